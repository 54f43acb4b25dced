"""Put bugs into low-rank factors, one at a time: the comparison of their layouts named for each must fail."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from backends.common.trainer.state import TrainerState
from backends.megatron import lora
from backends.megatron.conversion import export
from backends.megatron.conversion.placement import PlacedParameter
from tests.mutation.planted import Patch, no_bug, require_caught, run_planted
from tests.mutation.test_trainer import Mutation
from tests.parallel.lora import (
    LoraResult,
    check_base,
    check_factor_gradients,
    check_merged,
    check_norm,
    check_reference,
    lora_rank,
    lora_task,
    make_lora_case,
)
from tests.parallel.parity import check_scores

TP2, TP2_SP = {"tensor": 2}, {"tensor": 2, "sequence": True}


# ------------------------------------------------------------------------------------------------------------ the bugs
def gradients_of_a_are_not_summed(patch: Patch) -> None:
    patch.setattr(lora, "copy_to_tensor_model_parallel_region", lambda h, group: h)


def replicated_factors_are_not_marked(patch: Patch) -> None:
    correct = lora.LoraWeights.__init__

    def without_mark(self: lora.LoraWeights, *arguments: Any) -> None:
        correct(self, *arguments)
        for factor in self.parameters():
            factor.sequence_parallel = False  # type: ignore[attr-defined]

    patch.setattr(lora.LoraWeights, "__init__", without_mark)


def replicated_factors_count_on_every_rank(patch: Patch) -> None:
    correct = lora.set_tensor_model_parallel_attributes
    patch.setattr(
        lora, "set_tensor_model_parallel_attributes", lambda factor, is_split, *rest: correct(factor, True, *rest)
    )


def experts_count_only_on_the_first_rank(patch: Patch) -> None:
    correct = lora.set_tensor_model_parallel_attributes
    patch.setattr(
        lora, "set_tensor_model_parallel_attributes", lambda factor, is_split, *rest: correct(factor, False, *rest)
    )


def keys_and_values_are_swapped_in_the_export(patch: Patch) -> None:
    correct = export.place_lora_weights

    def swapped(*arguments: Any) -> list[PlacedParameter]:
        return [_without_order(placed) for placed in correct(*arguments)]

    patch.setattr(export, "place_lora_weights", swapped)


def _without_order(placed: PlacedParameter) -> PlacedParameter:
    sources = placed.rule.sources
    if len(sources) != 3:
        return placed
    query, key, value = sources
    return replace(placed, rule=replace(placed.rule, sources=(query, value, key)))


def alpha_is_forgotten_in_the_export(patch: Patch) -> None:
    correct = lora.merged
    patch.setattr(lora, "merged", lambda weight, a, b, owner, scale: correct(weight, a, b, owner, 1.0))


def weights_are_merged_in_place(patch: Patch) -> None:
    correct = lora.merged
    patch.setattr(lora, "merged", lambda weight, *factors: weight.copy_(correct(weight, *factors)))


def owners_are_forgotten(patch: Patch) -> None:
    """Queries, keys and values then use the factors of all three."""
    patch.setattr(lora, "block_diagonal", lambda b, owner: b.repeat(1, owner.shape[1]))


def the_reference_keeps_its_factors(patch: Patch) -> None:
    correct = TrainerState._fill

    def fill(self: TrainerState, values: Sequence[Tensor], base: bool) -> None:
        if any(value.any() for value in values):
            correct(self, values, base)

    patch.setattr(TrainerState, "_fill", fill)


def recomputed_layers_get_no_gradient(patch: Patch) -> None:
    patch.setattr(lora, "_require_gradient", lambda module, inputs, output: output)


# --------------------------------------------------------------------------------------------------------- the matrix
COMPARISONS = (check_scores, check_reference, check_factor_gradients, check_norm, check_merged, check_base)
MUTATIONS = [
    Mutation(gradients_of_a_are_not_summed, "qwen3", TP2, check_factor_gradients),
    Mutation(replicated_factors_are_not_marked, "qwen3", TP2_SP, check_factor_gradients),
    Mutation(replicated_factors_are_not_marked, "qwen3_moe", TP2_SP, check_factor_gradients),
    Mutation(replicated_factors_count_on_every_rank, "qwen3", TP2_SP, check_norm),
    Mutation(experts_count_only_on_the_first_rank, "qwen3_moe", {**TP2_SP, "expert": 2}, check_norm),
    Mutation(keys_and_values_are_swapped_in_the_export, "qwen3", {}, check_factor_gradients),
    Mutation(alpha_is_forgotten_in_the_export, "qwen3", TP2, check_merged),
    Mutation(weights_are_merged_in_place, "qwen3", {}, check_base),
    Mutation(owners_are_forgotten, "qwen3", {}, check_scores),
    Mutation(the_reference_keeps_its_factors, "qwen3", {}, check_reference),
    Mutation(recomputed_layers_get_no_gradient, "qwen3", {"recompute": "full"}, check_factor_gradients),
    Mutation(no_bug, "qwen3", {}, None),
    Mutation(no_bug, "qwen3", TP2_SP, None),
]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda family: make_lora_case(family, tmp_path_factory.mktemp(family), steps=0))


@pytest.fixture(scope="module")
def results(cases: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[LoraResult]]:
    directory = tmp_path_factory.mktemp("ranks")
    tasks = {str(each): (each.bug, lora_task(cases(each.family), each.layout, directory)) for each in MUTATIONS}
    return run_planted(lora_rank, directory, tasks)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_the_comparisons_catch(mutation: Mutation, cases: Any, results: dict[str, list[LoraResult]]) -> None:
    require_caught(COMPARISONS, mutation.caught_by, cases(mutation.family), results[str(mutation)])
