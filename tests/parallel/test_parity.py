"""Every parallel layout of Megatron agrees with Hugging Face's float64 model on unpacked sequences.

Compared are per-token logprobs and entropies, the RL loss (clipped surrogate, KL, entropy; with experts also the
routers' balancing loss) and its gradients tensor by tensor, and the change of the weights after two AdamW steps with
clipping and weight decay. A step consists of several packs in two windows. Every rank's memory is compared with the
plan. Packs also share prefixes (samples of one prompt, two of them equal and one the start of another; a prompt that
context ranks cut; rows that continue parts of one history), and have the supports of truncated samples. Not covered
here: CUDA kernels.
"""

from typing import Any

import pytest

from tests.parallel.harness import Row, check, parameters, rows
from tests.parallel.held import check_held
from tests.parallel.layouts import layout_of

pytestmark = pytest.mark.timeout(900)  # one fork runs many cases

CLAIMS: dict[str, tuple[str, ...]] = {
    "qwen3": (
        *("single", "recompute3", "tp2-sp", "cp4", "pp3-recompute1", "dp2-overlap"),
        "tp2-sp-cp2-ring_flash_attn",
        "pp2-vpp2-dp2-distributed-overlap",
    ),
    "qwen2": ("tp4-sp",),
    "llama": ("single",),
    "mistral": ("cp2-allgather",),
    "gemma3": ("tp2-sp",),
    "qwen3_moe": ("tp2-sp-ep2", "cp2-ep2-distributed-overlap"),
    "gpt_oss": ("tp2-sp-ep2", "cp2-ep2-distributed"),
    "glm4_moe": ("tp2-sp-ep2", "cp2"),
    "deepseek_v3": ("recompute3", "tp2-sp-ep2", "cp2-ep2-distributed", "cp2-allgather"),
    "deepseek_v3_direct": ("pp2-vpp2",),
    "qwen3_next": ("tp2-sp-ep2", "cp2-ep2-distributed"),
    "qwen3_5_text": ("tp2-sp", "pp2-vpp2"),
}
IN_ACCEPTANCE: dict[str, tuple[str, ...]] = {
    "qwen3": (
        *("recompute", "tp2", "pp2-vpp2", "cp2", "tp4", "cp4-allgather", "cp4-ring_flash_attn"),
        *("single-distributed", "dp2", "dp2-distributed-overlap", "pp3", "pp2-vpp2-recompute1"),
        *("tp2-sp-cp2-allgather", "tp2-cp2-dp2", "tp2-sp-pp2-recompute", "tp2-sp-pp2-cp2-distributed"),
    ),
    "qwen2": ("single", "pp2"),
    "llama": ("cp2",),
    "mistral": ("tp2-sp", "pp2"),
    "gemma3": ("single", "cp2-allgather", "tp4-sp", "recompute3", "pp2-vpp2"),
    "qwen3_moe": ("single", "recompute3", "tp2-sp", "pp2-vpp2", "pp2-dp2-ep2"),
    "gpt_oss": ("single", "pp2-dp2-ep2"),
    "glm4_moe": ("single", "tp2-sp", "tp4-sp", "cp2-ep2-distributed", "pp2-vpp2", "pp2-dp2-ep2"),
    "deepseek_v3": ("single", "pp2-dp2-ep2", "cp2-ring_flash_attn"),
    "deepseek_v3_direct": ("tp2-sp",),
    "qwen3_next": ("cp2-ring_flash_attn",),
    "qwen3_5_text": ("tp4-sp", "tp2-cp2-dp2", "cp2-allgather", "recompute3"),
    "qwen3_5_moe_text": ("tp2-sp",),
}
"""Every family's layouts: each axis that it claims, alone or combined with others."""

PLAIN = [
    *rows("plain", CLAIMS),
    *rows("plain", IN_ACCEPTANCE, True),
    *rows("rounded", {"qwen3": ("tp2-sp", "cp2-ring_flash_attn", "pp2")}),
    *rows("rounded", {"qwen3": ("single", "cp2")}, True),
]
PACKED = [
    # Without a name, attention over ranks is the ring, and for windows the all-gather.
    *rows("neighbor", {"glm4_moe": ("single", "cp2"), "gpt_oss": ("cp2",), "gemma3": ("single",), "mistral": ("cp2",)}),
    *rows("neighbor", {"glm4_moe": ("cp2-allgather",), "gpt_oss": ("single",)}, True),
    *rows("neighbor", {"gemma3": ("cp2",), "mistral": ("single",)}, True),
    *rows("neighbor", {"qwen3_next": ("bfloat16",)}, False, ("changed", 2), ("only", True)),
    *rows("lengths", {"qwen3_5_text": ("tp2-sp-cp2",)}),
    *rows("shared", {"qwen3": ("single", "pp2-vpp2", "tp2-sp-cp2", "offload")}),
    *rows("shared", {"qwen3": ("cp4", "dp2-distributed", "recompute", "recompute2")}, True),
    *rows("shared", {"qwen3_moe": ("tp2-sp-ep2",), "deepseek_v3": ("single", "cp2")}),
    *rows("shared", {"qwen3": ("single",)}, False, ("sharing", "prompts")),
    *rows("balanced", {"qwen3_moe": ("dp2-ep2", "tp2-sp-ep2", "cp2")}),
    *rows("supports", {"qwen3": ("tp2-sp", "pp2-recompute", "cp2")}),
    *rows("supports", {"qwen3": ("single",)}, True),
    *rows("supports", {"qwen3": ("tp2-sp", "cp2-allgather")}, False, ("shares", True)),
    *rows("supports", {"qwen3": ("pp2-recompute",)}, True, ("shares", True)),
]


@parameters(PLAIN)
def test_layout_computes_the_reference_and_holds_the_planned_memory(row: Row, cases: Any, results: Any) -> None:
    check(row, cases, results)
    # The plans of Qwen3's other layouts are traced in test_planned_memory.
    is_first = row.layout == CLAIMS.get(row.family, (row.layout,))[0]
    traced = row.later and not {"expert", "attention"}.isdisjoint(layout_of(row.layout))
    whole = row.feature == "plain" and (is_first or traced)
    check_held(results[row][0].config, [result.held for result in results[row]], whole)


@parameters(PACKED)
def test_packs_compute_the_reference(row: Row, cases: Any, results: Any) -> None:
    check(row, cases, results)


def test_packs_that_share_prefixes_are_smaller(cases: Any) -> None:
    """Otherwise the tests above would compare packs that share nothing."""
    assert [pack.shared_tokens for pack in cases("shared", "qwen3").packs()] == [9 * 3 + 1 + 6, 60, 13 + 13 + 8 + 10, 0]
