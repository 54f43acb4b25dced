"""Low-rank factors of the FSDP trainer agree with factors written out on transformers' float64 model.

The same values are compared as for Megatron (``test_lora``). All cases of as many ranks run in one fork. Not covered
here: CUDA.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.fsdp.checkpoint import StoredCheckpoint
from backends.fsdp.weights import export_buckets
from slime_like.algorithms.packing.pack import real_tokens
from slime_like.config import RunConfig
from slime_like.interfaces import Manifest, RankPlacement
from slime_like.trajectory import PackedTrajectory
from slime_like.weights.adapter import ADAPTER
from tests.parallel.lora import (
    Factors,
    Given,
    LoraCase,
    LoraResult,
    check_lora,
    check_merged,
    make_lora_case,
    packs_of_rank,
)
from tests.parallel.parity import STEPS, Settings
from tests.parallel.ranks import run_each, selected
from tests.parallel.steps import exported_from, exported_gradients, optimizer_steps, running, same_bits, train_windows
from tests.parallel.test_checkpoint import step_of_four, two_seeded_steps
from tests.support.acceptance import some_in_acceptance

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
    "cp2-linear-attention": ("qwen3_5_text", ALL, {"context": 2}),
    "dp2-offload": ("qwen3_moe", SOME, {"data": 2, "offload": True}),
    "dp2-kept-weights": ("qwen3", SOME, {"data": 2, "fsdp": {"reshard_after_forward": False}}),
    "dp2-other-names": ("gpt_neox", ALL, {"data": 2}),
    "dp2-bfloat16": ("qwen3_moe", SOME, {"data": 2, "dtype": "bfloat16"}),
    "dp2-sharded-gradients": ("qwen3", SOME, {"data": 2, "fsdp": {"accumulate": "sharded"}}),
}
IN_ACCEPTANCE = ("single", "dp2-moe", "dp2-offload", "dp2-kept-weights")


def fsdp_lora_config(
    case: LoraCase, directory: Path, layout: Settings, dtype: str = "float32", **lora: Any
) -> RunConfig:
    config = case.config(directory, {"backend": "fsdp", **layout}, dtype, **lora)
    return RunConfig(**{**dict(config), "data": {"max_prompt_tokens": 31}, "rollout": {"max_new_tokens": 31}})


def base_of(trainer: Any) -> Factors:
    """Return copies of this rank's rows of all frozen weights."""
    own = trainer.model.own_by_name() | trainer.model.kept_by_name()
    return {name: getattr(each, "_local_tensor", each).detach().clone() for name, each in own.items()}


def masters_of(trainer: Any) -> Factors:
    """Return float32 copies of all factors on the first rank, by PEFT's names."""
    model, factors = trainer.model, trainer.model.stored_by_name()
    rows = {name: each.to_local().detach() for name, each in factors.items()}
    buckets = export_buckets(factors, rows.__getitem__, model.pieces, torch.float32, 1 << 12, trainer.device)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket.tensors}


def check_adapter(trainer: Any, masters: Factors) -> None:
    """Check that an update of only the factors has exactly them, rounded to the model's type."""
    model = trainer.config.model
    adapter = model.model_copy(update={"lora": model.lora.model_copy(update={"sync": ADAPTER})})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.state, "_config", trainer.config.model_copy(update={"model": adapter}))
        export = trainer.export_weights()
        sent = {name: tensor.clone() for bucket in export for name, tensor in bucket.tensors}
    same_bits(sent, {name: each.to(getattr(torch, model.dtype)) for name, each in masters.items()})
    assert export.manifest == (Manifest.of(sent, ADAPTER) if masters else None)


def fsdp_lora_rank(
    placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory], denominator: float, factors: Factors
) -> LoraResult:
    """Return everything that the tests compare, from one rank."""
    with running(placement, config) as trainer:
        place = trainer.coordinates
        indices, mine, filled = packs_of_rank(place, packs)
        base, frozen = exported_from(trainer), base_of(trainer)
        trainer.state.fill_lora_weights(lambda shapes: Given(factors, shapes))
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
        exported_from(trainer)  # which must not change the base
        merged, weights = exported_from(trainer), masters_of(trainer)
        check_adapter(trainer, weights)
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
def results(request: pytest.FixtureRequest, lora_cases: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives a case's results of all ranks."""

    @cache
    def run(world: int) -> dict[str, list[LoraResult]]:
        directory, tasks = tmp_path_factory.mktemp(f"world{world}"), {}
        for (name,) in selected(request, "test_factors_compute_the_reference"):
            family, settings, layout = CASES[name]
            case = lora_cases(family, settings)
            dtype, layout = layout.get("dtype", "float32"), {k: v for k, v in layout.items() if k != "dtype"}
            config = fsdp_lora_config(case, directory, layout, dtype)
            if config.trainer.parallel.world_size == world:
                tasks[name] = (config, case.packs(), case.denominator, case.factors)
        found = run_each(fsdp_lora_rank, world, directory / "ranks", list(tasks.values()))
        return dict(zip(tasks, map(list, found), strict=True))

    return lambda name: run(1 if name.startswith("single") else 2)[name]


@pytest.mark.parametrize("name", some_in_acceptance(CASES, IN_ACCEPTANCE.__contains__))
def test_factors_compute_the_reference(name: str, lora_cases: Any, results: Any) -> None:
    case, found = lora_cases(*CASES[name][:2]), results(name)
    if "bfloat16" in name:
        check_merged(case, found)
    else:
        check_lora(case, found)


# ------------------------------------------------------------------------------------------------- dropout, checkpoints
def _dropped(placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory], factors: Factors) -> Any:
    """Return scores, and the gradients of a step with seeded dropout."""
    with running(placement, config) as trainer:
        trainer.state.fill_lora_weights(lambda shapes: Given(factors, shapes))
        torch.manual_seed(5)
        trainer.begin_step(1.0, real_tokens(packs))
        trainer.accumulate(packs, last=True)
        return trainer.score(packs), exported_gradients(trainer, 1.0)


def test_dropout_acts_only_in_training_and_alike_when_recomputed(lora_cases: Any, tmp_path: Path) -> None:
    case = lora_cases("qwen3_moe", SOME)
    settings: list[tuple[float, Settings]] = [(0.5, {}), (0.5, {"recompute": "full"}), (0.0, {})]
    configs = [fsdp_lora_config(case, tmp_path, layout, dropout=dropout) for dropout, layout in settings]
    tasks = [(config, case.packs(), case.factors) for config in configs]
    (dropped,), (again,), (without,) = run_each(_dropped, 1, tmp_path / "ranks", tasks)
    for scores, expected in zip(dropped[0], without[0], strict=True):
        same_bits(scores, expected)
    same_bits(again[1], dropped[1])
    assert all(not torch.equal(dropped[1][name], gradient) for name, gradient in without[1].items() if gradient.any())


def _continued(placement: RankPlacement, config: RunConfig, directory: Path, saves: bool) -> list[Any]:
    """Save after two steps, or load after one, and step once more. Return factors before and after, and a number."""
    with running(placement, config) as trainer:
        if saves:
            two_seeded_steps(trainer, placement)
            trainer.save(directory)
        else:
            step_of_four(trainer)
            trainer.load(directory)
        drawn, before = torch.rand(1), masters_of(trainer)
        step_of_four(trainer)
        return [drawn, before, masters_of(trainer)]


def test_only_factors_are_saved_and_continue_bit_for_bit(lora_cases: Any, tmp_path: Path) -> None:
    """Dropout continues, too, with the random numbers of the checkpoint."""
    case = lora_cases("qwen3_moe", SOME)
    config = fsdp_lora_config(case, tmp_path, {"data": 2}, "bfloat16", dropout=0.2)
    saved, loaded = run_each(
        _continued, 2, tmp_path / "ranks", [(config, tmp_path / "c", saves) for saves in (True, False)]
    )
    for one, other in zip(saved, loaded, strict=True):
        assert torch.equal(one[0], other[0])
        same_bits(other[1], one[1])
        same_bits(other[2], one[2])
    before, after = saved[0][1:]
    assert before.keys() == case.factors.keys() and all(not torch.equal(before[name], after[name]) for name in before)
    stored = StoredCheckpoint(tmp_path / "c").shapes
    names = {name.partition(".added.")[0] for name in stored if ".added." in name}
    assert {name for name in stored if ".added." not in name} == {"random.0.cpu", "random.1.cpu"}
    assert {name.split(".model.")[0] for name in names} == {"model", "optimizer.exp_avg", "optimizer.exp_avg_sq"}
    single = fsdp_lora_config(case, tmp_path, {}, "bfloat16", dropout=0.2)
    ((found,),) = run_each(_continued, 1, tmp_path / "single", [(single, tmp_path / "c", False)])
    same_bits(found[1], before)
