"""Put bugs into low-rank factors, one at a time: the comparison of their layouts named for each must fail.

The comparisons before it must succeed: a crash is no proof. A bug ends with the forked ranks that it is put into.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from backends.common.trainer.state import TrainerState
from backends.megatron import lora
from backends.megatron.conversion import export
from backends.megatron.conversion.placement import Placement
from slime_like.interfaces import RankPlacement
from tests.parallel.lora import (
    LoraCase,
    LoraResult,
    check_base,
    check_factor_gradients,
    check_merged,
    check_norm,
    check_reference,
    lora_rank,
    make_lora_case,
    run_lora,
)
from tests.parallel.parity import Settings, check_scores

TP2, TP2_SP = {"tensor": 2}, {"tensor": 2, "sequence": True}


# ------------------------------------------------------------------------------------------------------------ the bugs
def gradients_of_a_are_not_summed() -> None:
    lora.copy_to_tensor_model_parallel_region = lambda h, group: h


def replicated_factors_are_not_marked() -> None:
    correct = lora.Factors.__init__

    def without_mark(self: lora.Factors, *arguments: Any) -> None:
        correct(self, *arguments)
        for factor in self.parameters():
            factor.sequence_parallel = False  # type: ignore[attr-defined]

    lora.Factors.__init__ = without_mark  # type: ignore[method-assign]


def replicated_factors_count_on_every_rank() -> None:
    correct = lora.set_tensor_model_parallel_attributes
    lora.set_tensor_model_parallel_attributes = lambda factor, is_split, *rest: correct(factor, True, *rest)


def experts_count_only_on_the_first_rank() -> None:
    correct = lora.set_tensor_model_parallel_attributes
    lora.set_tensor_model_parallel_attributes = lambda factor, is_split, *rest: correct(factor, False, *rest)


def keys_and_values_are_swapped_in_the_export() -> None:
    correct = export.place_factors

    def swapped(*arguments: Any) -> list[Placement]:
        return [_without_order(placed) for placed in correct(*arguments)]

    export.place_factors = swapped


def _without_order(placed: Placement) -> Placement:
    sources = placed.rule.sources
    if len(sources) != 3:
        return placed
    query, key, value = sources
    return replace(placed, rule=replace(placed.rule, sources=(query, value, key)))


def alpha_is_forgotten_in_the_export() -> None:
    correct = lora.merged
    lora.merged = lambda weight, a, b, owner, scale: correct(weight, a, b, owner, 1.0)


def weights_are_merged_in_place() -> None:
    correct = lora.merged
    lora.merged = lambda weight, *factors: weight.copy_(correct(weight, *factors))


def owners_are_forgotten() -> None:
    """Queries, keys and values then use the factors of all three."""
    lora.block_diagonal = lambda b, owner: b.repeat(1, owner.shape[1])


def the_reference_keeps_its_factors() -> None:
    correct = TrainerState._fill

    def fill(self: TrainerState, values: Sequence[Tensor], base: bool) -> None:
        if any(value.any() for value in values):
            correct(self, values, base)

    TrainerState._fill = fill  # type: ignore[method-assign]


def recomputed_layers_get_no_gradient() -> None:
    lora._require_gradient = lambda module, inputs, output: output


# --------------------------------------------------------------------------------------------------------- the matrix
Comparison = Callable[[LoraCase, list[LoraResult]], None]


@dataclass(frozen=True)
class Mutation:
    """With ``bug`` in every rank, ``family`` under ``layout`` must fail the comparison ``caught_by``."""

    bug: Callable[[], None]
    family: str
    layout: Settings
    caught_by: Comparison


COMPARISONS: list[Comparison] = [
    check_scores,
    check_reference,
    check_factor_gradients,
    check_norm,
    check_merged,
    check_base,
]  # type: ignore[list-item]
MUTATIONS = [
    Mutation(gradients_of_a_are_not_summed, "qwen3", TP2, check_factor_gradients),
    Mutation(replicated_factors_are_not_marked, "qwen3", TP2_SP, check_factor_gradients),
    Mutation(replicated_factors_are_not_marked, "qwen3_moe", TP2_SP, check_factor_gradients),
    Mutation(replicated_factors_count_on_every_rank, "qwen3", TP2_SP, check_norm),
    Mutation(experts_count_only_on_the_first_rank, "qwen3_moe", {**TP2_SP, "expert": 2}, check_norm),
    Mutation(keys_and_values_are_swapped_in_the_export, "qwen3", {}, check_factor_gradients),
    Mutation(alpha_is_forgotten_in_the_export, "qwen3", TP2, check_merged),
    Mutation(weights_are_merged_in_place, "qwen3", {}, check_base),
    Mutation(owners_are_forgotten, "qwen3", {}, COMPARISONS[0]),
    Mutation(the_reference_keeps_its_factors, "qwen3", {}, check_reference),
    Mutation(recomputed_layers_get_no_gradient, "qwen3", {"recompute": "full"}, check_factor_gradients),
]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(family: str) -> LoraCase:
        return make_lora_case(family, tmp_path_factory.mktemp(family), steps=0)

    return make


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.bug.__name__}-{m.family}")
def test_the_comparisons_catch(mutation: Mutation, cases: Any, tmp_path: Path) -> None:
    case = cases(mutation.family)
    results = run_lora(case, mutation.layout, tmp_path, partial(_rank_with, mutation.bug))
    for comparison in COMPARISONS[: COMPARISONS.index(mutation.caught_by)]:
        comparison(case, results)
    with pytest.raises(AssertionError):
        mutation.caught_by(case, results)


def _rank_with(bug: Callable[[], None], placement: RankPlacement, *arguments: Any) -> LoraResult:
    bug()
    return lora_rank(placement, *arguments)
