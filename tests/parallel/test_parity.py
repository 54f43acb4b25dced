"""Every parallel layout agrees with Hugging Face's float64 model on unpacked sequences.

Compared are per-token logprobs and entropies, the RL loss (clipped surrogate, KL, entropy; with experts also the
routers' balancing loss) and its gradients tensor by tensor, and the change of the weights after two AdamW steps with
clipping and weight decay. A step consists of several packs in two windows. Every rank's memory is compared with the
plan. Not covered here: CUDA kernels.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.held import check_held
from tests.parallel.layouts import layout_of
from tests.parallel.parity import (
    MASKED,
    PACKS,
    Case,
    check_everything,
    check_gradients,
    layers_of,
    parity_config,
    samples_with_loss,
    task_of,
)
from tests.parallel.ranks import run_by_size, selected
from tests.parallel.reference import Reference
from tests.parallel.steps import scored_packs, train_rank
from tests.parallel.tiny import save_checkpoint, scored_sequences

pytestmark = pytest.mark.timeout(900)  # one fork runs many cases

CLAIMS: dict[str, tuple[str, ...]] = {
    "qwen3": (
        *("single", "recompute3", "tp2-sp", "cp4", "pp3-recompute1", "dp2-overlap"),
        "tp2-sp-cp2-ring_flash_attn",
        "pp2-vpp2-dp2-distributed-overlap",
        "tp2-sp-pp2-cp2-distributed",
    ),
    "qwen2": ("tp4-sp",),
    "llama": ("single",),
    "mistral": ("cp2-allgather",),
    "gemma3": ("tp2-sp",),
    "qwen3_moe": ("tp2-sp-ep2", "pp2-dp2-ep2", "cp2-ep2-distributed-overlap"),
    "gpt_oss": ("tp2-sp-ep2", "cp2-ep2-distributed"),
    "glm4_moe": ("tp2-sp-ep2", "cp2"),
    "deepseek_v3": ("recompute3", "tp2-sp-ep2", "cp2-ep2-distributed", "cp2-allgather"),
    "deepseek_v3_direct": ("pp2-vpp2",),
    "qwen3_next": ("tp2-sp-ep2", "cp2-ep2-distributed"),
    "qwen3_5_text": ("tp4-sp", "pp2-vpp2"),
}
IN_ACCEPTANCE: dict[str, tuple[str, ...]] = {
    "qwen3": (
        *("recompute", "tp2", "pp2-vpp2", "cp2", "tp4", "cp4-allgather", "cp4-ring_flash_attn"),
        *("single-distributed", "dp2", "dp2-distributed-overlap", "pp3", "pp2-vpp2-recompute1"),
        *("tp2-sp-cp2-allgather", "tp2-cp2-dp2", "tp2-sp-pp2-recompute"),
    ),
    "qwen2": ("single", "pp2"),
    "llama": ("cp2",),
    "mistral": ("tp2-sp", "pp2"),
    "gemma3": ("single", "cp2-allgather", "tp4-sp", "recompute3", "pp2-vpp2"),
    "qwen3_moe": ("single", "recompute3", "tp2-sp", "pp2-vpp2"),
    "gpt_oss": ("single", "pp2-dp2-ep2"),
    "glm4_moe": ("single", "tp2-sp", "tp4-sp", "cp2-ep2-distributed", "pp2-vpp2", "pp2-dp2-ep2"),
    "deepseek_v3": ("single", "pp2-dp2-ep2", "cp2-ring_flash_attn"),
    "deepseek_v3_direct": ("tp2-sp",),
    "qwen3_next": ("cp2-ring_flash_attn",),
    "qwen3_5_text": ("tp2-cp2-dp2", "cp2-allgather", "recompute3"),
    "qwen3_5_moe_text": ("tp2-sp",),
}
"""Every family's layouts: each axis that it claims, alone or combined with others."""


@pytest.mark.parametrize(
    ("family", "layout"),
    [(family, layout) for family, layouts in CLAIMS.items() for layout in layouts]
    + [
        pytest.param(family, layout, marks=pytest.mark.acceptance)
        for family, layouts in IN_ACCEPTANCE.items()
        for layout in layouts
    ],
)
def test_layout_computes_the_reference(family: str, layout: str, cases: Any, results: Any) -> None:
    case, (config, found) = cases(family, layers_of(layout_of(layout))), results[family, layout]
    check_everything(case, found)
    # The plans of Qwen3's other layouts are traced in test_planned_memory.
    is_first = layout == CLAIMS.get(family, (layout,))[0]
    check_held(config, [r.held for r in found], is_first or not {"expert", "attention"}.isdisjoint(layout_of(layout)))


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, cases: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run all selected layouts of all families; return each one's configuration and results of every rank."""
    directory, tasks = tmp_path_factory.mktemp("ranks"), {}
    for family, layout in selected(request, "test_layout_computes_the_reference"):
        case = cases(family, layers_of(layout_of(layout)))
        tasks[family, layout] = task_of(case, layout_of(layout), directory)
    found = run_by_size(train_rank, directory, tasks)
    return {name: (tasks[name][0], ranks) for name, ranks in found.items()}


def test_bfloat16_stays_near_the_reference(tmp_path: Path) -> None:
    """Mean logprob gap below 1e-2 nats, and gradients within 5 % of the reference on the same rounded weights.

    The clip range is wide, because rounding a ratio across its edge would change the gradient abruptly.
    """
    checkpoint = save_checkpoint("qwen3", tmp_path / "model", layers=2)
    sequences = scored_sequences([pair for pack in PACKS for pair in pack], fully_masked=MASKED)
    wide = {"name": "ppo_clip", "clip_low": 0.99, "clip_high": 100.0}
    names = ("single", "tp2-sp", "cp2", "cp2-ring_flash_attn", "pp2")
    configs = {name: parity_config(checkpoint, tmp_path, layout_of(name), "bfloat16", loss=wide) for name in names}
    reference = Reference(checkpoint, configs["single"].algorithm)
    reference.model.bfloat16().double()
    denominator = samples_with_loss(sequences)
    expected = reference.step(sequences, denominator)
    case = Case(checkpoint, sequences, expected)
    tasks = {name: (config, case.packs(), denominator, 1) for name, config in configs.items()}
    for name, results in run_by_size(train_rank, tmp_path, tasks).items():
        for index, scored in scored_packs(results).items():
            start = sum(len(pack) for pack in PACKS[:index])
            wanted = torch.cat(expected.logprobs[start : start + len(PACKS[index])])
            assert float((scored[0]["old_logprobs"].double() - wanted).abs().mean()) < 1e-2, name
        check_gradients(case, results, bound=5e-2)
        check_held(configs[name], [result.held for result in results])
