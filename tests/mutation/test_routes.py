"""Put bugs into the replay of routes, one at a time: the comparison with forced routes named for each must fail.

The comparison of scores must succeed if that of gradients is named: a crash is no proof. A bug ends with the forked
ranks that it is put into.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
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
from slime_like.interfaces import RankPlacement
from slime_like.trajectory import PackedTrajectory
from tests.parallel.parity import Settings, check_scores, fsdp_config
from tests.parallel.ranks import run_ranks
from tests.parallel.routes import RoutedCase, check_gradients_of_any, routed_case
from tests.parallel.steps import RankResult, train_rank

TP2_SP = {"tensor": 2, "sequence": True}
FSDP = {"backend": "fsdp"}


# ------------------------------------------------------------------------------------------------------------ the bugs
def rows_are_shifted_by_one() -> None:
    correct = routes.rows_of_tokens
    routes.rows_of_tokens = lambda pack: correct(pack).roll(-1)


def dense_layers_are_counted() -> None:
    correct = TokenRoutes.choose

    def choose(self: TokenRoutes, layer: int, own: Tensor) -> Tensor:
        return correct(self, min(layer + self.layers.start, self.layers[-1]), own)

    TokenRoutes.choose = choose  # type: ignore[method-assign]


def sequence_parallel_ranks_take_each_others_part() -> None:
    correct = BatchBuilder._rows

    def rows(self: BatchBuilder, shard: ContextShard) -> slice:
        part, count = correct(self, shard), shard.tokens.numel()
        return slice(count - part.stop, count - part.start)

    BatchBuilder._rows = rows  # type: ignore[method-assign]


def prompts_are_routed_live() -> None:
    correct = TokenRoutes.of

    def of(pack: PackedTrajectory, shard: ContextShard, rows: slice, replay: Replay) -> TokenRoutes:
        found, source = correct(pack, shard, rows, replay), shard.source[rows]
        of_prompt = (source >= 0) & ~pack.response_mask[source.clamp_min(0)]
        return replace(found, rows=found.rows.masked_fill(of_prompt, -1))

    TokenRoutes.of = of  # type: ignore[method-assign]


def unknown_routes_go_to_the_first_experts() -> None:
    correct = TokenRoutes.of

    def of(*arguments: Any) -> TokenRoutes:
        found = correct(*arguments)
        assert found.given is not None
        return replace(found, given=torch.where(found.given < 0, torch.arange(found.top_k), found.given))

    TokenRoutes.of = of  # type: ignore[method-assign]


def probabilities_are_zeroed() -> None:
    correct, weights = _LayerReplay.get_replay_topk, experts._weights

    def replayed(self: _LayerReplay, *arguments: Any) -> tuple[Tensor, Tensor]:
        scores, chosen = correct(self, *arguments)
        return scores * 0, chosen

    _LayerReplay.get_replay_topk = replayed  # type: ignore[method-assign]
    experts._weights = lambda *arguments: weights(*arguments) * 0


def probabilities_have_no_gradient() -> None:
    correct, weights = _LayerReplay.get_replay_topk, experts._weights

    def replayed(self: _LayerReplay, *arguments: Any) -> tuple[Tensor, Tensor]:
        scores, chosen = correct(self, *arguments)
        return scores.detach(), chosen

    _LayerReplay.get_replay_topk = replayed  # type: ignore[method-assign]
    experts._weights = lambda *arguments: weights(*arguments).detach()


# ---------------------------------------------------------------------------------------------------------- the matrix
@dataclass(frozen=True)
class Mutation:
    """With ``bug`` in every rank, ``family`` under ``layout`` must fail the comparison ``caught_by``."""

    bug: Callable[[], None]
    family: str
    layout: Settings
    caught_by: Callable[[RoutedCase, list[RankResult]], None] = check_scores


MUTATIONS = [
    Mutation(rows_are_shifted_by_one, "qwen3_moe", {}),
    Mutation(rows_are_shifted_by_one, "deepseek_v3", FSDP),
    Mutation(dense_layers_are_counted, "deepseek_v3", {}),
    Mutation(sequence_parallel_ranks_take_each_others_part, "qwen3_moe", TP2_SP),
    Mutation(prompts_are_routed_live, "qwen3_moe", {}),
    Mutation(unknown_routes_go_to_the_first_experts, "qwen3_moe", {}),
    Mutation(probabilities_are_zeroed, "qwen3_moe", {}),
    Mutation(probabilities_are_zeroed, "deepseek_v3", FSDP),
    Mutation(probabilities_have_no_gradient, "qwen3_moe", {}, check_gradients_of_any),
    Mutation(probabilities_have_no_gradient, "qwen3_moe", FSDP, check_gradients_of_any),
]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(family: str) -> RoutedCase:
        return routed_case(family, tmp_path_factory.mktemp(family))

    return make


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.bug.__name__}-{m.family}")
def test_forced_routes_catch(mutation: Mutation, cases: Any, tmp_path: Path) -> None:
    case = cases(mutation.family)
    results = _run_with(mutation.bug, case, mutation.layout, tmp_path)
    if mutation.caught_by is not check_scores:
        check_scores(case, results)
    with pytest.raises(AssertionError):
        mutation.caught_by(case, results)


def _run_with(bug: Callable[[], None], case: RoutedCase, layout: Settings, directory: Path) -> list[RankResult]:
    config = fsdp_config(case, directory, {"backend": "megatron", **layout})
    world = config.trainer.parallel.world_size
    arguments = bug, config, case.packs(), case.denominator, 0
    return run_ranks(_rank_with, world, directory / "ranks", *arguments)


def _rank_with(placement: RankPlacement, bug: Callable[[], None], *arguments: Any) -> RankResult:
    bug()
    return train_rank(placement, *arguments)
