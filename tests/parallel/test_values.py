"""A critic's values, loss, gradients and updates agree with transformers' float64 value model in every layout."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.models.dimensions import ModelDimensions
from tests.parallel.assembly import stacked_experts, to_hugging_face
from tests.parallel.parity import (
    GRADIENT_BOUND,
    LOGPROB_BOUND,
    LOSS_BOUND,
    STEPS,
    Case,
    Settings,
    check_changes,
    check_tensors,
    layers_of,
)
from tests.parallel.ranks import run_by_size, run_ranks, selected
from tests.parallel.steps import RankResult, by_stage, scored_packs
from tests.parallel.values import CLIP, train_critic, value_case, value_config
from tests.support.acceptance import some_in_acceptance

LAYOUTS: dict[str, tuple[str, Settings]] = {
    "tp2-sp": ("qwen3", {"tensor": 2, "sequence": True}),
    "pp2-tied": ("qwen2", {"pipeline": 2}),
    "pp2-interleaved": ("qwen2", {"pipeline": 2, "virtual_pipeline": 2, "distributed": True}),
    "cp2-distributed-overlap": ("qwen3", {"context": 2, "distributed": True, "overlap": True}),
    "dp2": ("qwen2", {"data": 2}),
    "ep2": ("qwen3_moe", {"data": 2, "expert": 2}),
    "latent-tp2-sp": ("deepseek_v3", {"tensor": 2, "sequence": True}),
    "fsdp": ("qwen2", {"backend": "fsdp"}),
    "gemma3": ("gemma3_text", {}),
    "fsdp-hybrid": ("qwen3_5_text", {"backend": "fsdp"}),
    "fsdp-dp2-cp2": ("qwen3_moe", {"backend": "fsdp", "data": 2, "context": 2}),
}
IN_ACCEPTANCE = ("pp2-tied", "dp2", "fsdp", "fsdp-hybrid")


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda family, layers: value_case(family, tmp_path_factory.mktemp(family), layers=layers))


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, case_of: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[RankResult]]:
    directory, tasks = tmp_path_factory.mktemp("ranks"), {}
    for (name,) in selected(request, "test_layout_computes_the_reference"):
        family, settings = LAYOUTS[name]
        case = case_of(family, layers_of(settings))
        config = value_config(case.checkpoint, directory, settings, **case.algorithm)
        tasks[name] = (config, case.packs(), case.denominator, STEPS)
    return run_by_size(train_critic, directory, tasks)


@pytest.mark.parametrize("layout", some_in_acceptance(LAYOUTS, IN_ACCEPTANCE.__contains__))
def test_layout_computes_the_reference(layout: str, case_of: Any, results: dict[str, list[RankResult]]) -> None:
    family, settings = LAYOUTS[layout]
    case = case_of(family, layers_of(settings))
    check_values(case, results[layout])
    check_statistics(case, results[layout])
    check_all_gradients(case, results[layout])


@pytest.mark.parametrize("layout", ["tp2-sp", "fsdp"])
def test_bfloat16_stays_near_the_reference(layout: str, tmp_path: Path) -> None:
    """Gradients are within 5 % of the reference on the same rounded weights."""
    family, settings = LAYOUTS[layout]
    case = value_case(family, tmp_path / "case", steps=0, rounded=True)
    config = value_config(case.checkpoint, tmp_path, settings, "bfloat16")
    world = config.trainer.parallel.world_size
    results = run_ranks(train_critic, world, tmp_path / "ranks", config, case.packs(), case.denominator, 0)
    check_values(case, results, bound=0.05)
    check_exported(case, results, bound=0.05)


def check_values(case: Case, results: list[RankResult], bound: float = LOGPROB_BOUND) -> None:
    expected = torch.cat(case.expected.logprobs)
    found = scored_packs(results)
    rows = torch.cat([found[index][0]["values"] for index in sorted(found)])
    assert rows.dtype == torch.float32 and float(expected.abs().mean()) > 0.1
    torch.testing.assert_close(rows.double(), expected, rtol=0, atol=bound)
    assert all(torch.equal(scored[0]["values"], each["values"]) for scored in found.values() for each in scored)


def check_statistics(case: Case, results: list[RankResult]) -> None:
    mask = torch.cat([sequence.loss_mask for sequence in case.sequences])
    values = torch.cat(case.expected.logprobs)[mask]
    returns = torch.cat([sequence.returns for sequence in case.sequences]).double()[mask]
    old = torch.cat([sequence.values for sequence in case.sequences]).double()[mask]
    bounded = old + (values - old).clamp(-CLIP, CLIP)
    clipped = ((bounded - returns) ** 2 > (values - returns) ** 2).double().mean()
    wanted: dict[str, Tensor | float] = {
        "loss": case.expected.loss,
        "moe_aux_loss": case.expected.balance,
        "values": values.mean(),
        "returns": returns.mean(),
        "explained_variance": 1 - (returns - values).var() / returns.var(),
        "clipfrac": clipped,
        "old_gap_max": (values - old).abs().max(),
        "num_tokens": float(mask.sum()),
    }
    assert 0.1 < float(clipped) < 0.9
    first = [result.stats[0] for result in results if result.stats[0] is not None]
    assert first, "no rank returned the step's statistics"
    for stats in first:
        for name, value in wanted.items():
            assert float(getattr(stats, name)) == pytest.approx(float(value), abs=LOSS_BOUND), name


def check_all_gradients(case: Case, results: list[RankResult]) -> None:
    """Compare gradients in memory and exported, and the updates of the weights. FSDP's are whole on every rank."""
    check_exported(case, results, GRADIENT_BOUND)
    if results[0].gradients.keys() == case.expected.gradients.keys():
        for result in results:
            check_tensors(result.gradients, case.expected.gradients, GRADIENT_BOUND)
            check_changes(case, result.weights)
        return
    dimensions = ModelDimensions.from_checkpoint(case.checkpoint, values=True)
    gradients, weights = (to_hugging_face(by_stage(results, what), dimensions) for what in ("gradients", "weights"))
    check_tensors(gradients, case.expected.gradients, GRADIENT_BOUND)
    check_changes(case, weights)


def check_exported(case: Case, results: list[RankResult], bound: float) -> None:
    """Compare exported gradients, each from exactly one rank."""
    exported: dict[str, Tensor] = {}
    for result in results:
        assert not exported.keys() & result.exported.keys()
        exported |= result.exported
    check_tensors(stacked_experts(exported), case.expected.gradients, bound)
