"""Critics, replayed routes and exact distillation agree with float64 references in every layout of both backends.

Values, their loss, gradients and updates are those of transformers' value model. Replaying the trainer's own routes
changes no bit of logprobs and gradients; forced random routes, some of them unknown, agree with a mixture that has
hand-written weights; a step's later updates repeat the routes of its start. Distilling students agree with
transformers' student and teachers.
"""

from typing import Any

import pytest

from tests.parallel.harness import Row, check, parameters, rows

pytestmark = pytest.mark.timeout(900)  # one fork runs many cases

CRITICS = [
    *rows("values", {"qwen3": ("tp2-sp", "cp2-distributed-overlap"), "qwen2": ("pp2-vpp2-distributed",)}),
    *rows("values", {"qwen3_moe": ("dp2-ep2", "fsdp-cp2"), "deepseek_v3": ("tp2-sp",), "gemma3_text": ("single",)}),
    *rows("values", {"qwen2": ("pp2", "dp2", "fsdp"), "qwen3_5_text": ("fsdp",), "qwen3_moe": ("fsdp-dp2-cp2",)}, True),
    *rows("values", {"qwen3": ("tp2-sp",), "qwen2": ("fsdp",)}, False, ("rounded", True)),
]

RECOMPUTED, PLAIN = ("recompute", "fsdp-recompute"), ("single", "fsdp")
PAIRS = ("pp2-vpp2", "cp2", "tp2-sp-ep2", "fsdp-cp2")
OTHERS = ("tp2-sp", "dp2", "fsdp-dp2")
SHARES = ("shares", True)
# Of gpt-oss, Megatron replays no routes, and its windows exclude shared prefixes.
ROUTES = [
    *rows("routes", {"qwen3_moe": PAIRS, "deepseek_v3": RECOMPUTED, "gpt_oss": ("fsdp-cp2",)}),
    *rows("routes", {"qwen3_moe": RECOMPUTED + PLAIN + OTHERS, "deepseek_v3": PLAIN + PAIRS + OTHERS}, True),
    *rows("routes", {"gpt_oss": ("fsdp", "fsdp-recompute", "fsdp-dp2")}, True),
    *rows("routes", {"qwen3_moe": ("cp2-tree", "fsdp-cp2-tree")}, False, SHARES),
    *rows("routes", {"qwen3_moe": ("tp2-sp-tree",)}, True, SHARES),
    *rows("routes", {"deepseek_v3": ("tp2-sp-tree", "cp2-tree", "fsdp-cp2-tree")}, True, SHARES),
    *rows("later routes", {"qwen3_moe": ("tp2-sp-ep2", "pp2-vpp2", "fsdp-cp2")}),
    *rows("later routes", {"qwen3_moe": ("cp2",), "deepseek_v3": PAIRS, "gpt_oss": ("fsdp-cp2",)}, True),
]

TWO_TEACHERS = ("second", 32)
STUDENTS = [
    *rows("distilled", {"qwen3": ("tp2-sp", "pp2", "cp2", "fsdp-cp2")}),
    *rows("distilled", {"qwen3": ("dp2-distributed-overlap", "fsdp", "fsdp-dp2-cp2")}, True),
    *rows("distilled", {"qwen3": ("tp2",)}, False, SHARES),
    *rows("distilled", {"qwen3": ("fsdp",)}, True, SHARES),
    *rows("distilled", {"qwen3": ("tp2",)}, False, TWO_TEACHERS),
    *rows("distilled", {"qwen3": ("fsdp-dp2",)}, True, TWO_TEACHERS),
]


@parameters(CRITICS + ROUTES + STUDENTS)
def test_layout_computes_the_reference(row: Row, cases: Any, results: Any) -> None:
    check(row, cases, results)
