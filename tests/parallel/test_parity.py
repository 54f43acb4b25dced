"""Every parallel layout computes what Hugging Face's float64 model computes on unpacked sequences.

Compared: per-token logprobs and entropies, gradients of the whole RL loss (clipped surrogate, KL, entropy) tensor by
tensor, the loss itself, and the change of the weights after three AdamW steps with clipping and weight decay. The step
is fed as several packs in two windows. Not covered here: CUDA kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.algorithms.packing import pack_sequences
from slime_like.config import RunConfig
from slime_like.config.dimensions import ModelDimensions
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory
from tests.parallel.assembly import to_hugging_face
from tests.parallel.ranks import run_ranks
from tests.parallel.reference import Reference, ReferenceStep, adamw_steps
from tests.parallel.steps import RankResult, by_stage, scored_packs, train_rank
from tests.parallel.tiny import save_checkpoint, scored_sequences

LOGPROB_BOUND = 1e-5
GRADIENT_BOUND = 1e-5
UPDATE_BOUND = 1e-4
STEPS = 3

# (prompt, response) lengths. Ordinary with a single-token response; one long prompt whose only responses stand in one
# context rank's slice; one sequence as long as its pack; a fully masked sample beside another.
PACKS = [[(5, 9), (3, 1), (11, 6), (2, 17)], [(60, 2)], [(8, 21)], [(7, 3), (4, 12)]]
MASKED = (7,)
TAIL = 5  # padding at the end of the first pack

OPTIMIZER = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1, "clip_grad": 4.0}
ALGORITHM = {"kl_coef": 0.05, "entropy_coef": 0.01, "reduction": "samples"}

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "single-distributed": {"distributed": True},
    "tp2": {"tensor": 2},
    "tp2-sp": {"tensor": 2, "sequence": True},
    "pp2": {"pipeline": 2},
    "pp2-interleaved": {"pipeline": 2, "virtual_pipeline": 2},
    "pp3-uneven": {"pipeline": 3},
    "cp2": {"context": 2},
    "cp4": {"context": 4},
    "cp2-allgather": {"context": 2, "attention": "allgather"},
    "cp4-allgather": {"context": 4, "attention": "allgather"},
    "tp2-sp-cp2-allgather": {"tensor": 2, "sequence": True, "context": 2, "attention": "allgather"},
    "dp2": {"data": 2},
    "dp2-distributed": {"data": 2, "distributed": True},
    "tp2-cp2-dp2": {"tensor": 2, "context": 2, "data": 2},
    "tp2-pp2-cp2-sp-distributed": {"tensor": 2, "pipeline": 2, "context": 2, "sequence": True, "distributed": True},
    "ep2": {"data": 2, "expert": 2},
    "cp2-ep2-distributed": {"context": 2, "expert": 2, "distributed": True},
    "pp2-dp2-ep2": {"pipeline": 2, "data": 2, "expert": 2},
    "tp2-sp-ep2": {"tensor": 2, "sequence": True, "expert": 2},
    "full-recompute": {"recompute": "full"},
    "selective-recompute": {"recompute": "selective"},
    "tp2-pp2-sp-full-recompute": {"tensor": 2, "pipeline": 2, "sequence": True, "recompute": "full"},
}


@dataclass
class Case:
    """One family's checkpoint and sequences, with what the reference says of them."""

    checkpoint: Path
    sequences: list[ScoredTrajectory]
    expected: ReferenceStep
    updated: dict[str, Tensor]
    initial: dict[str, Tensor]

    @property
    def denominator(self) -> float:
        return float(sum(bool(s.loss_mask.any()) for s in self.sequences))

    def packs(self) -> list[PackedTrajectory]:
        packs, start = [], 0
        for index, lengths in enumerate(PACKS):
            part = self.sequences[start : start + len(lengths)]
            budget = sum(s.total_len for s in part) + TAIL if index == 0 else None
            packs.append(pack_sequences(part, target_tokens_per_batch=budget))
            start += len(lengths)
        return packs


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(family: str) -> Case:
        checkpoint = save_checkpoint(family, tmp_path_factory.mktemp(family))
        sequences = scored_sequences([pair for pack in PACKS for pair in pack], fully_masked=MASKED)
        config = _config(checkpoint, tmp_path_factory.mktemp("run"), {})
        reference = Reference(checkpoint, config.algorithm)
        initial = {name: p.detach().clone() for name, p in reference.model.named_parameters()}
        denominator = float(sum(bool(s.loss_mask.any()) for s in sequences))
        expected = reference.step(sequences, denominator)
        updated = adamw_steps(
            reference, sequences, denominator, STEPS, OPTIMIZER["clip_grad"], OPTIMIZER["lr"], OPTIMIZER["eps"]
        )
        return Case(checkpoint, sequences, expected, updated, initial)

    return make


def _config(
    checkpoint: Path, run_dir: Path, layout: dict[str, Any], dtype: str = "float32", **algorithm: float
) -> RunConfig:
    settings = dict(layout)
    distributed = settings.pop("distributed", False)
    options = {name: settings.pop(name) for name in ("recompute", "attention") if name in settings}
    return RunConfig(
        run_dir=run_dir,
        steps=STEPS,
        model={"path": checkpoint, "dtype": dtype},
        algorithm={**ALGORITHM, **algorithm},
        trainer={
            "parallel": settings,
            "optimizer": {**OPTIMIZER, "distributed": distributed},
            **options,
            "head_chunk_tokens": 8,
            "step_timeout_s": 60.0,
            "cpu_threads": 1,
        },
    )


def _run(case: Case, layout: dict[str, Any], directory: Path) -> list[RankResult]:
    config = _config(case.checkpoint, directory, layout)
    world = config.trainer.parallel.world_size
    return run_ranks(train_rank, world, directory / "ranks", config, case.packs(), case.denominator, STEPS)


@pytest.mark.parametrize("layout", [name for name, settings in LAYOUTS.items() if "expert" not in settings])
def test_layout_computes_the_reference(layout: str, cases: Any, tmp_path: Path) -> None:
    _compare(cases("qwen3"), LAYOUTS[layout], tmp_path)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2", "single"),
        ("qwen2", "tp2-sp"),
        ("qwen2", "pp2"),
        ("llama", "single"),
        ("llama", "cp2"),
        ("qwen3_moe", "single"),
        ("qwen3_moe", "ep2"),
        ("qwen3_moe", "tp2-sp-ep2"),
        ("qwen3_moe", "tp2-sp"),
        ("qwen3_moe", "cp2-ep2-distributed"),
        ("qwen3_moe", "pp2-dp2-ep2"),
    ],
)
def test_other_families_compute_the_reference(family: str, layout: str, cases: Any, tmp_path: Path) -> None:
    _compare(cases(family), LAYOUTS[layout], tmp_path)


def _compare(case: Case, layout: dict[str, Any], directory: Path) -> None:
    results = _run(case, layout, directory)
    dimensions = ModelDimensions.from_checkpoint(case.checkpoint)
    _check_scores(case, results)
    _check_loss(case, results)
    if not layout.get("distributed") or len(results) == 1:
        gradients = to_hugging_face(by_stage(results, "gradients"), dimensions)
        _check_tensors(gradients, case.expected.gradients, GRADIENT_BOUND)
    weights = to_hugging_face(by_stage(results, "weights"), dimensions)
    changes = {name: weights[name].double() - case.initial[name] for name in case.initial}
    expected = {name: case.updated[name] - case.initial[name] for name in case.initial}
    _check_tensors(changes, expected, UPDATE_BOUND)


def _check_scores(case: Case, results: list[RankResult]) -> None:
    found = scored_packs(results)
    start = 0
    for index, lengths in enumerate(PACKS):
        stop = start + len(lengths)
        for kind in ("logprobs", "entropy"):
            expected = torch.cat(getattr(case.expected, kind)[start:stop])
            for scored in found[index]:
                torch.testing.assert_close(
                    getattr(scored, kind).double(), expected, rtol=0, atol=LOGPROB_BOUND, msg=f"{kind} of pack {index}"
                )
        start = stop


def _check_loss(case: Case, results: list[RankResult]) -> None:
    first = [result.stats[0] for result in results if result.stats[0] is not None]
    assert first, "no rank returned the step's figures"
    for stats in first:
        assert float(stats.loss) == pytest.approx(case.expected.loss, abs=1e-5)
        assert float(stats.num_tokens) == sum(int(s.loss_mask.sum()) for s in case.sequences)


def _check_tensors(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert found.keys() == expected.keys()
    errors = {
        name: float((found[name].double() - value).norm() / value.norm().clamp_min(1e-12))
        for name, value in expected.items()
    }
    worst = sorted(errors.items(), key=lambda item: -item[1])[:5]
    assert worst[0][1] <= bound, "\n".join(f"{name}: relative error {error:.2e}" for name, error in worst)


@pytest.mark.parametrize("layout", ["single", "tp2-sp", "cp2", "pp2"])
def test_bfloat16_stays_near_the_reference(layout: str, tmp_path: Path) -> None:
    """Mean logprob gap below 1e-2 nats and gradients within 5 % of the reference on the same rounded weights.

    The clip is opened wide: a ratio that rounding moves over the clip's edge would change the gradient by a jump.
    """
    checkpoint = save_checkpoint("qwen3", tmp_path / "model")
    sequences = scored_sequences([pair for pack in PACKS for pair in pack], fully_masked=MASKED)
    config = _config(checkpoint, tmp_path, LAYOUTS[layout], "bfloat16", clip_low=0.99, clip_high=100.0)
    reference = Reference(checkpoint, config.algorithm)
    reference.model.bfloat16().double()
    denominator = float(sum(bool(s.loss_mask.any()) for s in sequences))
    expected = reference.step(sequences, denominator)
    case = Case(checkpoint, sequences, expected, {}, {})
    world = config.trainer.parallel.world_size
    results = run_ranks(train_rank, world, tmp_path / "ranks", config, case.packs(), denominator, 1)
    for index, scored in scored_packs(results).items():
        start = sum(len(pack) for pack in PACKS[:index])
        wanted = torch.cat(expected.logprobs[start : start + len(PACKS[index])])
        assert float((scored[0].logprobs.double() - wanted).abs().mean()) < 1e-2
    gradients = to_hugging_face(by_stage(results, "gradients"), ModelDimensions.from_checkpoint(checkpoint))
    _check_tensors(gradients, expected.gradients, 5e-2)
