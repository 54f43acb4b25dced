"""Low-rank factors of the FSDP trainer agree with factors written out on transformers' float64 model.

The same values are compared as for Megatron (``test_lora``). All cases of as many ranks run in one fork. Not covered
here: CUDA.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_like.algorithms.packing.pack import zero_weight_pack
from slime_like.config import RunConfig
from slime_like.interfaces import RankPlacement
from slime_like.trajectory import PackedTrajectory
from slime_like.weights.adapter import ADAPTER
from tests.parallel.lora import Factors, Given, LoraCase, LoraResult, check_lora, make_lora_case
from tests.parallel.parity import STEPS, Settings
from tests.parallel.ranks import run_each
from tests.parallel.steps import exported_from, exported_gradients, optimizer_steps, running, train_windows

ALL: tuple[tuple[str, Any], ...] = ()
SOME = (("rank", 3), ("targets", "q_proj,gate_proj,down_proj"))
"""A rank of 3 suits no grouped product, and the second of two ranks has fewer rows of A."""

CASES: dict[str, tuple[str, tuple[tuple[str, Any], ...], Settings]] = {
    "single": ("qwen3", ALL, {}),
    "single-some-moe": ("qwen3_moe", SOME, {}),
    "dp2": ("qwen3", ALL, {"data": 2}),
    "cp2-full-recompute": ("qwen3", SOME, {"context": 2, "recompute": "full"}),
    "dp2-moe": ("qwen3_moe", ALL, {"data": 2}),
    "cp2-latent-moe": ("deepseek_v3", ALL, {"context": 2}),
    "dp2-offload": ("qwen3_moe", SOME, {"data": 2, "offload": True}),
    "dp2-kept-weights": ("qwen3", SOME, {"data": 2, "fsdp": {"reshard_after_forward": False}}),
    "dp2-sharded-gradients": ("qwen3", SOME, {"data": 2, "fsdp": {"accumulate": "sharded"}}),
}


def fsdp_lora_config(
    case: LoraCase, directory: Path, layout: Settings, dtype: str = "float32", **lora: Any
) -> RunConfig:
    config = case.config(directory, {"backend": "fsdp", **layout}, dtype, **lora)
    return RunConfig(**{**dict(config), "data": {"max_prompt_tokens": 31}, "rollout": {"max_new_tokens": 31}})


def base_of(trainer: Any) -> Factors:
    """Return copies of this rank's rows of all frozen weights."""
    own = trainer.model.own_by_name() | trainer.model.kept_by_name()
    return {name: getattr(each, "_local_tensor", each).detach().clone() for name, each in own.items()}


def fsdp_lora_rank(
    placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory], denominator: float, factors: Factors
) -> LoraResult:
    """Return everything that the tests compare, from one rank."""
    with running(placement, config) as trainer:
        place = trainer.coordinates
        indices = list(range(place.data, len(packs), place.data_size))
        mine = [packs[index] for index in indices]
        filled = mine + [zero_weight_pack(packs[0])] * (-(-len(packs) // place.data_size) - len(mine))
        base, frozen = exported_from(trainer), base_of(trainer)
        trainer.state.fill_factors(lambda shapes: Given(factors, shapes))
        scored, reference = trainer.score(filled)[: len(mine)], trainer.score(filled, "reference")[: len(mine)]
        train_windows(trainer, filled, denominator)
        exported = exported_gradients(trainer, denominator)
        stats = optimizer_steps(trainer, STEPS, denominator, lambda: train_windows(trainer, filled, denominator))
        for name, weight in base_of(trainer).items():
            assert torch.equal(weight, frozen[name]) and weight.dtype == frozen[name].dtype, f"{name} changed"
        for name, parameter in trainer.model.parameters_by_name().items():
            of_factor = ".added." in name
            assert parameter.requires_grad == of_factor and (of_factor or parameter.grad is None), name
            assert parameter.dtype == (torch.float32 if of_factor else getattr(torch, config.model.dtype)), name
        assert trainer.optimizer.moments.keys() == trainer.model.stored_by_name().keys()
        merged, adapter = exported_from(trainer), trainer.state.export_adapter(1 << 12)
        manifest = adapter.manifest
        weights = {name: tensor.clone() for bucket in adapter for name, tensor in bucket.tensors}
        if placement.rank == 0:
            assert manifest is not None and manifest.updates == ADAPTER
            described = {name: (info.dtype, info.shape) for name, info in manifest.tensors.items()}
            assert described == {name: (config.model.dtype, tuple(each.shape)) for name, each in factors.items()}
        return LoraResult(
            place, indices, scored, {}, stats, weights, exported, reference=reference, base=base, merged=merged
        )


@pytest.fixture(scope="module")
def lora_cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(family: str, settings: tuple[tuple[str, Any], ...]) -> LoraCase:
        return make_lora_case(family, tmp_path_factory.mktemp(family), **dict(settings))

    return make


@pytest.fixture(scope="module")
def results(lora_cases: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives a case's results of all ranks."""

    @cache
    def run(world: int) -> dict[str, list[LoraResult]]:
        directory, tasks = tmp_path_factory.mktemp(f"world{world}"), {}
        for name, (family, settings, layout) in CASES.items():
            case = lora_cases(family, settings)
            config = fsdp_lora_config(case, directory, layout)
            if config.trainer.parallel.world_size == world:
                tasks[name] = (config, case.packs(), case.denominator, case.factors)
        found = run_each(fsdp_lora_rank, world, directory / "ranks", list(tasks.values()))
        return dict(zip(tasks, map(list, found), strict=True))

    return lambda name: run(1 if name.startswith("single") else 2)[name]


@pytest.mark.parametrize("name", CASES)
def test_factors_compute_the_reference(name: str, lora_cases: Any, results: Any) -> None:
    check_lora(lora_cases(*CASES[name][:2]), results(name))
