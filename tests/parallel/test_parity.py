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
from tests.parallel.parity import (
    MASKED,
    PACKS,
    Case,
    Settings,
    check_everything,
    check_gradients,
    layers_of,
    parity_config,
    run_case,
    samples_with_loss,
)
from tests.parallel.ranks import run_ranks
from tests.parallel.reference import Reference
from tests.parallel.steps import scored_packs, train_rank
from tests.parallel.tiny import save_checkpoint, scored_sequences

OVERLAP = {"overlap": True, "overlap_bucket_params": 20_000}
LAYOUTS: dict[str, Settings] = {
    "single": {},
    "single-distributed": {"distributed": True},
    "tp2": {"tensor": 2},
    "tp2-sp": {"tensor": 2, "sequence": True},
    "tp4-shared-kv-heads": {"tensor": 4},
    "tp4-sp-shared-kv-heads": {"tensor": 4, "sequence": True},
    "pp2": {"pipeline": 2},
    "pp2-interleaved": {"pipeline": 2, "virtual_pipeline": 2},
    "pp3-uneven": {"pipeline": 3},
    "cp2": {"context": 2},
    "cp4": {"context": 4},
    "cp2-allgather": {"context": 2, "attention": "allgather"},
    "cp4-allgather": {"context": 4, "attention": "allgather"},
    "tp2-sp-cp2-allgather": {"tensor": 2, "sequence": True, "context": 2, "attention": "allgather"},
    "cp2-ring-flash-attn": {"context": 2, "attention": "ring_flash_attn"},
    "cp4-ring-flash-attn": {"context": 4, "attention": "ring_flash_attn"},
    "tp2-sp-cp2-ring-flash-attn": {"tensor": 2, "sequence": True, "context": 2, "attention": "ring_flash_attn"},
    "dp2": {"data": 2},
    "tp2-cp2-dp2": {"tensor": 2, "context": 2, "data": 2},
    "tp2-pp2-cp2-sp-distributed": {"tensor": 2, "pipeline": 2, "context": 2, "sequence": True, "distributed": True},
    "ep2": {"data": 2, "expert": 2},
    "cp2-ep2-distributed": {"context": 2, "expert": 2, "distributed": True},
    "pp2-dp2-ep2": {"pipeline": 2, "data": 2, "expert": 2},
    "tp2-sp-ep2": {"tensor": 2, "sequence": True, "expert": 2},
    "dp2-overlap": {"data": 2, **OVERLAP},
    "dp2-distributed-overlap": {"data": 2, "distributed": True, **OVERLAP},
    "pp2-interleaved-dp2-distributed-overlap": {
        **{"pipeline": 2, "virtual_pipeline": 2, "data": 2, "distributed": True},
        **OVERLAP,
    },
    "cp2-ep2-distributed-overlap": {"context": 2, "expert": 2, "distributed": True, **OVERLAP},
    "full-recompute": {"recompute": "full"},
    "block-recompute": {"recompute": 3},
    "pp3-uneven-block-recompute": {"pipeline": 3, "recompute": 1},
    "pp2-interleaved-block-recompute": {"pipeline": 2, "virtual_pipeline": 2, "recompute": 1},
    "tp2-pp2-sp-full-recompute": {"tensor": 2, "pipeline": 2, "sequence": True, "recompute": "full"},
}


CLAIMS: dict[str, tuple[str, ...]] = {
    "qwen3": (
        *("single", "single-distributed", "full-recompute", "block-recompute"),
        *("tp2", "tp2-sp", "pp2-interleaved", "cp2", "dp2"),
        *("pp3-uneven", "pp3-uneven-block-recompute"),
        *("tp4-shared-kv-heads", "cp4", "cp4-allgather", "cp4-ring-flash-attn"),
        *("tp2-sp-cp2-allgather", "tp2-sp-cp2-ring-flash-attn"),
        *("tp2-pp2-sp-full-recompute", "pp2-interleaved-block-recompute"),
        *("dp2-overlap", "dp2-distributed-overlap", "pp2-interleaved-dp2-distributed-overlap"),
        *("tp2-cp2-dp2", "tp2-pp2-cp2-sp-distributed"),
    ),
    "qwen2": ("single", "pp2", "tp4-sp-shared-kv-heads"),
    "llama": ("single", "cp2"),
    "mistral": ("tp2-sp", "cp2-allgather"),
    "gemma3": ("tp2-sp", "cp2-allgather", "pp2-interleaved"),
    "qwen3_moe": (
        *("single", "block-recompute", "tp2-sp", "tp2-sp-ep2", "pp2-interleaved", "pp2-dp2-ep2"),
        "cp2-ep2-distributed-overlap",
    ),
    "gpt_oss": ("single", "tp2-sp-ep2", "pp2-dp2-ep2", "cp2-ep2-distributed"),
    "glm4_moe": ("single", "tp2-sp-ep2", "pp2-dp2-ep2", "cp2"),
    "deepseek_v3": (
        *("single", "block-recompute", "tp2-sp-ep2", "pp2-dp2-ep2", "cp2-ep2-distributed"),
        *("cp2-allgather", "cp2-ring-flash-attn"),
    ),
    "deepseek_v3_direct": ("tp2-sp", "pp2-interleaved"),
    "qwen3_next": ("tp2-sp-ep2", "cp2-ep2-distributed"),
    "qwen3_5_text": ("tp4-sp-shared-kv-heads", "pp2-interleaved"),
}
IN_ACCEPTANCE: dict[str, tuple[str, ...]] = {
    "mistral": ("pp2",),
    "gemma3": ("single", "tp4-sp-shared-kv-heads", "block-recompute"),
    "glm4_moe": ("tp2-sp", "tp4-sp-shared-kv-heads", "cp2-ep2-distributed", "pp2-interleaved"),
    "qwen3_next": ("cp2-ring-flash-attn",),
    "qwen3_5_text": ("tp2-cp2-dp2", "cp2-allgather", "block-recompute"),
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
def test_layout_computes_the_reference(family: str, layout: str, cases: Any, tmp_path: Path) -> None:
    _compare(cases(family, layers_of(LAYOUTS[layout])), LAYOUTS[layout], tmp_path)


def _compare(case: Case, layout: Settings, directory: Path) -> None:
    results = run_case(case, layout, directory)
    check_everything(case, results)
    config = parity_config(case.checkpoint, directory, layout, **case.algorithm)
    check_held(config, [result.held for result in results])


@pytest.mark.parametrize("layout", ["single", "tp2-sp", "cp2", "cp2-ring-flash-attn", "pp2"])
def test_bfloat16_stays_near_the_reference(layout: str, tmp_path: Path) -> None:
    """Mean logprob gap below 1e-2 nats, and gradients within 5 % of the reference on the same rounded weights.

    The clip range is wide, because rounding a ratio across its edge would change the gradient abruptly.
    """
    checkpoint = save_checkpoint("qwen3", tmp_path / "model", layers=2)
    sequences = scored_sequences([pair for pack in PACKS for pair in pack], fully_masked=MASKED)
    config = parity_config(
        checkpoint,
        tmp_path,
        LAYOUTS[layout],
        "bfloat16",
        loss={"name": "ppo_clip", "clip_low": 0.99, "clip_high": 100.0},
    )
    reference = Reference(checkpoint, config.algorithm)
    reference.model.bfloat16().double()
    denominator = samples_with_loss(sequences)
    expected = reference.step(sequences, denominator)
    case = Case(checkpoint, sequences, expected)
    world = config.trainer.parallel.world_size
    results = run_ranks(train_rank, world, tmp_path / "ranks", config, case.packs(), denominator, 1)
    for index, scored in scored_packs(results).items():
        start = sum(len(pack) for pack in PACKS[:index])
        wanted = torch.cat(expected.logprobs[start : start + len(PACKS[index])])
        assert float((scored[0]["old_logprobs"].double() - wanted).abs().mean()) < 1e-2
    check_gradients(case, results, bound=5e-2)
    check_held(config, [result.held for result in results])
