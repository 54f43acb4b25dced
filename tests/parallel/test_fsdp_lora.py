"""Low-rank factors of the FSDP trainer agree with factors written by hand on Hugging Face's float64 model.

All cases of as many ranks run in one fork. Not covered here: CUDA.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.algorithms.packing.pack import real_tokens, zero_weight_pack
from slime_like.config import LoraConfig, RunConfig
from slime_like.interfaces import RankPlacement, Scores
from slime_like.trajectory import GRPOStats, PackedTrajectory
from tests.parallel.lora_reference import LoraReference
from tests.parallel.parity import (
    GRADIENT_BOUND,
    LOGPROB_BOUND,
    OPTIMIZER,
    STEPS,
    UPDATE_BOUND,
    Case,
    Settings,
    check_tensors,
    fsdp_config,
)
from tests.parallel.ranks import run_each
from tests.parallel.reference import ReferenceStep
from tests.parallel.steps import optimizer_steps, running

LORA: dict[str, LoraConfig] = {
    "all": LoraConfig(rank=4, alpha=6.0),
    "some": LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "gate_proj", "down_proj")),
}
"""A rank of 3 suits no grouped product without padding, and leaves a rank without rows of A."""

CASES: dict[str, tuple[str, str, Settings]] = {
    "single": ("qwen3", "all", {}),
    "single-moe": ("qwen3_moe", "some", {}),
    "dp2": ("qwen3", "all", {"data": 2}),
    "cp2-full-recompute": ("qwen3", "some", {"context": 2, "recompute": "full"}),
    "dp2-moe": ("qwen3_moe", "all", {"data": 2}),
    "cp2-latent-moe": ("deepseek_v3", "all", {"context": 2}),
    "dp2-offload-kept-weights": (
        "qwen3_moe",
        "some",
        {"data": 2, "offload": True, "fsdp": {"reshard_after_forward": False}},
    ),
    "dp2-sharded-gradients": ("qwen3", "some", {"data": 2, "fsdp": {"accumulate": "sharded"}}),
}


@dataclass
class LoraCase:
    """A checkpoint with non-zero factors, and the reference's results: a step, updated factors, the base's logprobs."""

    case: Case
    reference: LoraReference
    adapter: Path
    expected: ReferenceStep
    updated: dict[str, Tensor]
    of_base: list[Tensor]


@dataclass
class Found:
    """One rank's results. ``merged`` are exported weights, after ``STEPS`` updates like ``factors``."""

    packs: list[int]
    scored: list[Scores]
    reference: list[Scores]
    gradients: dict[str, Tensor]
    stats: list[GRPOStats | None]
    manifest: Any
    factors: dict[str, Tensor]
    merged: dict[str, Tensor]
    base_is_unchanged: bool
    trained: dict[str, tuple[str, bool]]


def _exported(export: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in export for name, tensor in bucket.tensors}


def _base(trainer: Any) -> list[Tensor]:
    return [each.to_local().detach().clone() for each in trainer.model.own_by_name().values()]


def train_factors(
    placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory], denominator: float, adapter: Path
) -> Found:
    with running(placement, config) as trainer:
        trainer.state.load_adapter(adapter)
        base = _base(trainer)
        indices = list(range(trainer.coordinates.data, len(packs), trainer.coordinates.data_size))
        window = -(-len(packs) // trainer.coordinates.data_size)
        mine = [packs[index] for index in indices] + [zero_weight_pack(packs[0])] * (window - len(indices))

        def accumulate() -> None:
            trainer.begin_step(denominator, real_tokens(mine))
            trainer.accumulate(mine[:1], last=False)
            trainer.accumulate(mine[1:], last=True)

        scored, reference = trainer.score(mine), trainer.score(mine, "reference")
        accumulate()
        gradients = _exported(trainer.export_gradients(denominator))
        stats = optimizer_steps(trainer, STEPS, denominator, accumulate)
        adapter_export = trainer.state.export_adapter(1 << 12)
        return Found(
            indices,
            scored[: len(indices)],
            reference[: len(indices)],
            gradients,
            stats,
            adapter_export.manifest,
            _exported(adapter_export),
            _exported(trainer.export_weights()),
            all(map(torch.equal, base, _base(trainer))),
            {name: (str(p.dtype), p.requires_grad) for name, p in trainer.model.parameters_by_name().items()},
        )


@pytest.fixture(scope="module")
def lora_cases(cases: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(family: str, settings: str) -> LoraCase:
        case = cases(family)
        algorithm = fsdp_config(case, case.checkpoint, {}).algorithm
        reference = LoraReference(case.checkpoint, algorithm, LORA[settings])
        arguments = case.sequences, case.denominator
        adapter = reference.save(tmp_path_factory.mktemp(family) / "adapter")
        updated = reference.adamw(arguments, STEPS, OPTIMIZER["clip_grad"], OPTIMIZER["lr"], OPTIMIZER["eps"])
        of_base = case.expected.logprobs
        return LoraCase(case, reference, adapter, reference.step(*arguments), updated, of_base)

    return make


def lora_config(case: Case, settings: str, directory: Path, layout: Settings, dtype: str = "float32") -> RunConfig:
    config = fsdp_config(case, directory, layout, dtype)
    return config.model_copy(update={"model": config.model.model_copy(update={"lora": LORA[settings]})})


@pytest.fixture(scope="module")
def trained(lora_cases: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives each case's ranks' results."""

    @cache
    def run(world: int) -> dict[str, list[Found]]:
        directory, tasks = tmp_path_factory.mktemp(f"world{world}"), {}
        for name, (family, settings, layout) in CASES.items():
            lora = lora_cases(family, settings)
            config = lora_config(lora.case, settings, directory, layout)
            if config.trainer.parallel.world_size == world:
                tasks[name] = (config, lora.case.packs(), lora.case.denominator, lora.adapter)
        return dict(
            zip(
                tasks, map(list, run_each(train_factors, world, directory / "ranks", list(tasks.values()))), strict=True
            )
        )

    return lambda name: run(1 if name.startswith("single") else 2)[name]


def check_scores(lora: LoraCase, results: list[Found]) -> None:
    starts = [0, *torch.tensor([pack.num_sequences for pack in lora.case.packs()]).cumsum(0).tolist()]
    for result in results:
        for kind, expected in (("scored", lora.expected.logprobs), ("reference", lora.of_base)):
            for index, scored in zip(result.packs, getattr(result, kind), strict=True):
                values = torch.cat(expected[starts[index] : starts[index + 1]])
                (name,) = scored.keys() - {"entropy"}
                torch.testing.assert_close(scored[name].double(), values, rtol=0, atol=LOGPROB_BOUND)


def check_gradients(lora: LoraCase, results: list[Found]) -> None:
    check_tensors(results[0].gradients, lora.expected.gradients, GRADIENT_BOUND)
    assert not any(result.gradients for result in results[1:])


def check_updates(lora: LoraCase, results: list[Found]) -> None:
    initial = {name: leaf.detach() for name, leaf in lora.reference.factors.items()}
    found = {name: value.double() - initial[name] for name, value in results[0].factors.items()}
    check_tensors(found, {name: value - initial[name] for name, value in lora.updated.items()}, UPDATE_BOUND)


@pytest.mark.parametrize("name", CASES)
def test_factors_compute_and_train_like_the_reference(name: str, lora_cases: Any, trained: Any) -> None:
    family, settings, _ = CASES[name]
    lora, results = lora_cases(family, settings), trained(name)
    check_scores(lora, results)
    check_gradients(lora, results)
    check_updates(lora, results)


@pytest.mark.parametrize("name", CASES)
def test_only_factors_are_trained(name: str, trained: Any) -> None:
    for result in trained(name):
        assert result.base_is_unchanged
        assert all(
            (dtype, of_grad) == ("torch.float32", ".added." in n) for n, (dtype, of_grad) in result.trained.items()
        )
