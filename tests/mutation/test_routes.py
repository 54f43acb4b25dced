"""Put bugs into the replay of routes, one at a time: the comparison with forced routes named for each must fail."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.common.step import routes
from backends.common.step.routes import Replay, TokenRoutes
from backends.fsdp import experts
from backends.megatron.micro_batch import BatchBuilder
from backends.megatron.router import _LayerReplay
from slime_like.algorithms.context import ContextShard
from slime_like.trajectory import PackedTrajectory
from tests.mutation.planted import Patch, no_bug, require_caught, run_planted
from tests.mutation.test_trainer import Mutation
from tests.parallel.parity import check_scores, fsdp_config
from tests.parallel.routes import check_gradients_of_any, routed_case
from tests.parallel.steps import RankResult, train_rank

TP2_SP = {"tensor": 2, "sequence": True}
FSDP = {"backend": "fsdp"}


# ------------------------------------------------------------------------------------------------------------ the bugs
def rows_are_shifted_by_one(patch: Patch) -> None:
    correct = routes.rows_of_tokens
    patch.setattr(routes, "rows_of_tokens", lambda pack: correct(pack).roll(-1))


def dense_layers_are_counted(patch: Patch) -> None:
    correct = TokenRoutes.choose

    def choose(self: TokenRoutes, layer: int, own: Tensor) -> Tensor:
        return correct(self, min(layer + self.layers.start, self.layers[-1]), own)

    patch.setattr(TokenRoutes, "choose", choose)


def sequence_parallel_ranks_take_each_others_part(patch: Patch) -> None:
    correct = BatchBuilder._rows

    def rows(self: BatchBuilder, shard: ContextShard) -> slice:
        part, count = correct(self, shard), shard.tokens.numel()
        return slice(count - part.stop, count - part.start)

    patch.setattr(BatchBuilder, "_rows", rows)


def prompts_are_routed_live(patch: Patch) -> None:
    correct = TokenRoutes.of

    def of(pack: PackedTrajectory, shard: ContextShard, rows: slice, replay: Replay) -> TokenRoutes:
        found, source = correct(pack, shard, rows, replay), shard.source[rows]
        of_prompt = (source >= 0) & ~pack.response_mask[source.clamp_min(0)]
        return replace(found, rows=found.rows.masked_fill(of_prompt, -1))

    patch.setattr(TokenRoutes, "of", of)


def unknown_routes_go_to_the_first_experts(patch: Patch) -> None:
    correct = TokenRoutes.of

    def of(*arguments: Any) -> TokenRoutes:
        found = correct(*arguments)
        assert found.given is not None
        return replace(found, given=torch.where(found.given < 0, torch.arange(found.top_k), found.given))

    patch.setattr(TokenRoutes, "of", of)


def probabilities_are_zeroed(patch: Patch) -> None:
    correct, weights = _LayerReplay.get_replay_topk, experts._weights

    def replayed(self: _LayerReplay, *arguments: Any) -> tuple[Tensor, Tensor]:
        scores, chosen = correct(self, *arguments)
        return scores * 0, chosen

    patch.setattr(_LayerReplay, "get_replay_topk", replayed)
    patch.setattr(experts, "_weights", lambda *arguments: weights(*arguments) * 0)


def probabilities_have_no_gradient(patch: Patch) -> None:
    correct, weights = _LayerReplay.get_replay_topk, experts._weights

    def replayed(self: _LayerReplay, *arguments: Any) -> tuple[Tensor, Tensor]:
        scores, chosen = correct(self, *arguments)
        return scores.detach(), chosen

    patch.setattr(_LayerReplay, "get_replay_topk", replayed)
    patch.setattr(experts, "_weights", lambda *arguments: weights(*arguments).detach())


# ---------------------------------------------------------------------------------------------------------- the matrix
COMPARISONS = (check_scores, check_gradients_of_any)
MUTATIONS = [
    Mutation(rows_are_shifted_by_one, "qwen3_moe", {}, check_scores),
    Mutation(rows_are_shifted_by_one, "deepseek_v3", FSDP, check_scores),
    Mutation(dense_layers_are_counted, "deepseek_v3", {}, check_scores),
    Mutation(sequence_parallel_ranks_take_each_others_part, "qwen3_moe", TP2_SP, check_scores),
    Mutation(prompts_are_routed_live, "qwen3_moe", {}, check_scores),
    Mutation(unknown_routes_go_to_the_first_experts, "qwen3_moe", {}, check_scores),
    Mutation(probabilities_are_zeroed, "qwen3_moe", {}, check_scores),
    Mutation(probabilities_are_zeroed, "deepseek_v3", FSDP, check_scores),
    Mutation(probabilities_have_no_gradient, "qwen3_moe", {}, check_gradients_of_any),
    Mutation(probabilities_have_no_gradient, "qwen3_moe", FSDP, check_gradients_of_any),
    Mutation(no_bug, "qwen3_moe", {}, None),
    Mutation(no_bug, "qwen3_moe", FSDP, None),
]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda family: routed_case(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module")
def results(cases: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[RankResult]]:
    directory, tasks = tmp_path_factory.mktemp("ranks"), {}
    for mutation in MUTATIONS:
        case = cases(mutation.family)
        config = fsdp_config(case, directory, {"backend": "megatron", **mutation.layout})
        tasks[str(mutation)] = (mutation.bug, (config, case.packs(), case.denominator, 0))
    return run_planted(train_rank, directory, tasks)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_forced_routes_catch(mutation: Mutation, cases: Any, results: dict[str, list[RankResult]]) -> None:
    require_caught(COMPARISONS, mutation.caught_by, cases(mutation.family), results[str(mutation)])
