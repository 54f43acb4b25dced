"""Put known bugs of parallel training into the trainer, one at a time: the parity matrix must notice each.

A bug is put in by replacing one function in the forked ranks, and ends with them. The matrix's comparison named for it
must then fail, and the earlier comparisons must not: a crash is no proof. Not covered: CUDA kernels, several hosts.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.attention.prefixes import PrefixAttention
from backends.common.attention.ring_flash_attn import Llama3Segments, RingFlashAttention
from backends.common.linear_attention import Boundaries, Recurrence
from backends.common.step import packs
from backends.common.step.balance import BalanceLoss, ExpertLoads, RoutedTokens
from backends.megatron import micro_batch, state
from backends.megatron.dispatch import Dispatcher
from backends.megatron.families import gated_delta
from backends.megatron.trainer import MegatronTrainer
from slime_like.algorithms import context
from slime_like.interfaces import RankPlacement
from slime_like.trajectory import PackedTrajectory
from tests.parallel.parity import (
    Case,
    Settings,
    check_biases,
    check_gradients,
    check_scores,
    layers_of,
    make_case,
    run_case,
)
from tests.parallel.shared_prefixes import shared_case
from tests.parallel.steps import RankResult, train_rank
from tests.parallel.test_router_biases import History, check_roles, histories, history
from tests.support.shards import local_boundaries

# By name, because the package has a function of the same name.
finalization = importlib.import_module("megatron.core.distributed.finalize_model_grads")
_QK_NORMS = ("q_layernorm", "k_layernorm")


# ------------------------------------------------------------------------------------------------------------ the bugs
def logits_are_read_at_the_token_itself() -> None:
    correct = context.response_logit_index
    context.response_logit_index = lambda packed: correct(packed) + 1


def positions_stay_behind_the_zigzag() -> None:
    correct = micro_batch.rotary_table

    def table(inv_freq: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return correct(inv_freq, torch.arange(positions.numel(), device=positions.device), dtype)

    micro_batch.rotary_table = table


def ring_gets_contiguous_chunks() -> None:
    correct = context._local_coordinates

    def coordinates(cu_padded: Tensor, size: int, rank: int, layout: str) -> tuple[Tensor, Tensor]:
        segment, offset = correct(cu_padded, 1, 0, "zigzag")
        local = torch.div(cu_padded.diff(), size, rounding_mode="floor")[segment]
        mine = torch.div(offset, local, rounding_mode="floor") == rank
        return segment[mine], offset[mine]

    context._local_coordinates = coordinates


def sequences_begin_where_the_rank_begins() -> None:
    def attention(name: str, shard: context.ContextShard, group: dist.ProcessGroup) -> PrefixAttention:
        return PrefixAttention.of(local_boundaries(shard), None, range(shard.tokens.numel()), group)

    micro_batch.choose_attention = attention


def a_prefix_is_seen_by_the_rank_that_holds_it() -> None:
    correct = PrefixAttention.of

    def of(boundaries: Tensor, parents: Tensor | None, part: range, group: dist.ProcessGroup) -> PrefixAttention:
        if parents is None:
            return correct(boundaries, parents, part, group)
        held = (boundaries[:-1] >= part.start) & (boundaries[1:] <= part.stop)
        return correct(boundaries, torch.where(held[parents.clamp_min(0)], parents, -1), part, group)

    PrefixAttention.of = of  # type: ignore[method-assign]


def the_package_is_given_the_ranks_own_boundaries() -> None:
    def attention(name: str, shard: context.ContextShard, group: dist.ProcessGroup) -> RingFlashAttention:
        return RingFlashAttention(Llama3Segments.of(local_boundaries(shard), 0, 1), group)

    micro_batch.choose_attention = attention


def the_package_is_given_zigzag_chunks() -> None:
    micro_batch.context_layout_of = lambda attention: "zigzag"  # type: ignore[attr-defined]


def padding_is_routed_like_the_last_sequence() -> None:
    correct = RoutedTokens.of

    def of(pack: PackedTrajectory, *arguments: Any) -> RoutedTokens | None:
        tokens = correct(pack, *arguments)
        return tokens and replace(tokens, sequence=tokens.sequence.clamp(max=pack.num_sequences - 1))

    RoutedTokens.of = of  # type: ignore[method-assign]


def fillers_are_routed_like_samples() -> None:
    correct = RoutedTokens.of

    def of(pack: PackedTrajectory, *arguments: Any) -> RoutedTokens | None:
        return correct(replace(pack, is_filler=False), *arguments)

    RoutedTokens.of = of  # type: ignore[method-assign]


def every_micro_batch_takes_its_own_mean() -> None:
    correct = MegatronTrainer._micro_batch_loss

    def loss(self: MegatronTrainer, batch: micro_batch.ModelInput, logprobs: Tensor, entropy: Tensor) -> Tensor:
        return correct(self, batch, logprobs, entropy) / batch.pack.token_weights.sum().clamp_min(1e-6)

    MegatronTrainer._micro_batch_loss = loss  # type: ignore[method-assign]


def replicas_are_averaged() -> None:
    correct = MegatronTrainer.finalize_gradients

    def finalize(self: MegatronTrainer, denominator: float) -> None:
        correct(self, denominator * self.coordinates.data_size)

    MegatronTrainer.finalize_gradients = finalize  # type: ignore[method-assign]


def loss_is_scaled_by_the_context_size() -> None:
    correct = packs.join_context_parts

    def join(part: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = correct(part, group)
        return whole + (group.size() - 1) * (whole - whole.detach())

    packs.join_context_parts = join


def tied_embedding_is_not_reduced() -> None:
    finalization._allreduce_word_embedding_grads = lambda *arguments: None


def query_and_key_norms_are_not_reduced() -> None:
    correct = finalization._allreduce_non_tensor_model_parallel_grads

    def reduce(model: Any, *arguments: Any) -> None:
        norms = [p for chunk in model for name, p in chunk.named_parameters() if name.split(".")[-2] in _QK_NORMS]
        before = [parameter.main_grad.clone() for parameter in norms]
        correct(model, *arguments)
        for parameter, gradient in zip(norms, before, strict=True):
            parameter.main_grad.copy_(gradient)

    finalization._allreduce_non_tensor_model_parallel_grads = reduce


def norms_of_value_heads_are_not_reduced() -> None:
    gated_delta.copy_to_tensor_model_parallel_region = lambda weight: weight


def states_begin_where_the_rank_begins() -> None:
    def recurrence(cls: Any, shard: context.ContextShard, group: dist.ProcessGroup) -> Recurrence:
        tokens = torch.arange(shard.tokens.numel())
        return Recurrence(Boundaries.of(local_boundaries(shard)), tokens, tokens, None)

    Recurrence.of = classmethod(recurrence)  # type: ignore[method-assign, assignment]


def routers_loss_is_divided_by_the_denominator() -> None:
    correct = BalanceLoss.of_step
    BalanceLoss.of_step = lambda coefficient, denominator, *rest: correct(coefficient, 1.0, *rest)  # type: ignore


def experts_shares_stay_in_the_order_of_tokens() -> None:
    correct = Dispatcher.dispatch_preprocess

    def preprocess(self: Dispatcher, hidden: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return correct(self, hidden, routing_map, probs)[0], probs[routing_map]

    Dispatcher.dispatch_preprocess = preprocess  # type: ignore[method-assign]


def biases_move_towards_the_load() -> None:
    correct = ExpertLoads.move

    def move(self: ExpertLoads, biases: dict[int, Tensor]) -> None:
        self.rate = -self.rate
        correct(self, biases)

    ExpertLoads.move = move  # type: ignore[method-assign, assignment]


def recomputed_layers_count_twice() -> None:
    correct = RoutedTokens.count

    def count(self: RoutedTokens, *arguments: Any) -> None:
        self.counted.clear()
        correct(self, *arguments)

    RoutedTokens.count = count  # type: ignore[method-assign]


def biases_are_not_weights() -> None:
    state.named_weights = lambda chunk: chunk.named_parameters()


# ---------------------------------------------------------------------------------------------------------- the matrix
@dataclass(frozen=True)
class Mutation:
    """With ``bug`` in every rank, ``family`` under ``layout`` must fail the comparison ``caught_by``."""

    bug: Callable[[], None]
    family: str
    layout: Settings
    caught_by: Literal["scores", "gradients", "norm"]


ALLGATHER = {"context": 2, "attention": "allgather"}
RING_FLASH_ATTN = {"context": 2, "attention": "ring_flash_attn"}
INTERLEAVED = {"pipeline": 2, "virtual_pipeline": 2}

MUTATIONS = [
    Mutation(logits_are_read_at_the_token_itself, "qwen3", {}, "scores"),
    Mutation(positions_stay_behind_the_zigzag, "qwen3", {"context": 2}, "scores"),
    Mutation(ring_gets_contiguous_chunks, "qwen3", {"context": 2}, "scores"),
    Mutation(sequences_begin_where_the_rank_begins, "qwen3", ALLGATHER, "scores"),
    Mutation(the_package_is_given_the_ranks_own_boundaries, "qwen3", RING_FLASH_ATTN, "scores"),
    Mutation(the_package_is_given_zigzag_chunks, "qwen3", RING_FLASH_ATTN, "scores"),
    Mutation(padding_is_routed_like_the_last_sequence, "qwen3_moe", {}, "gradients"),
    Mutation(fillers_are_routed_like_samples, "qwen3_moe", INTERLEAVED, "gradients"),
    Mutation(every_micro_batch_takes_its_own_mean, "qwen3", {}, "gradients"),
    Mutation(replicas_are_averaged, "qwen3", {"data": 2}, "gradients"),
    Mutation(loss_is_scaled_by_the_context_size, "qwen3", {"context": 2}, "gradients"),
    Mutation(tied_embedding_is_not_reduced, "qwen2", {"pipeline": 2}, "gradients"),
    Mutation(query_and_key_norms_are_not_reduced, "qwen3", {"tensor": 2, "sequence": True}, "gradients"),
    Mutation(norms_of_value_heads_are_not_reduced, "qwen3_5_text", {"tensor": 2}, "gradients"),
    Mutation(states_begin_where_the_rank_begins, "qwen3_5_text", {"context": 2}, "scores"),
    Mutation(routers_loss_is_divided_by_the_denominator, "qwen3_moe", {}, "gradients"),
    Mutation(experts_shares_stay_in_the_order_of_tokens, "qwen3_moe", {}, "scores"),
]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(family: str, layers: int = 2) -> Case:
        return make_case(family, tmp_path_factory.mktemp(family), steps=0, layers=layers)

    return make


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.bug.__name__)
def test_the_matrix_catches(mutation: Mutation, cases: Any, tmp_path: Path) -> None:
    case = cases(mutation.family, layers_of(mutation.layout))
    results = _run_with(mutation.bug, case, mutation.layout, tmp_path)
    if mutation.caught_by == "gradients":
        check_scores(case, results)
    comparison = {"scores": check_scores, "gradients": check_gradients}[mutation.caught_by]
    with pytest.raises(AssertionError):
        comparison(case, results)


BIASES: list[tuple[Callable[[], None], Settings]] = [
    (biases_move_towards_the_load, {}),
    (padding_is_routed_like_the_last_sequence, {}),
    (recomputed_layers_count_twice, {"recompute": "full"}),
]


@pytest.mark.parametrize(("bug", "layout"), BIASES)
def test_the_matrix_catches_wrong_biases(bug: Callable[[], None], layout: Settings, tmp_path: Path) -> None:
    case = make_case("deepseek_v3_direct", tmp_path / "case", steps=1)
    results = run_case(case, layout, tmp_path, partial(train_with, bug), steps=1)
    check_scores(case, results)
    with pytest.raises(AssertionError):
        check_biases(case, results)


def test_roles_that_share_biases_are_caught(tmp_path: Path) -> None:
    ((found,),) = histories(tmp_path, ["megatron"], partial(history_with, biases_are_not_weights))
    with pytest.raises(AssertionError):
        check_roles(found)


def test_the_matrix_of_shared_prefixes_catches_keys_of_other_ranks(tmp_path: Path) -> None:
    case = shared_case("qwen3", tmp_path / "model", steps=0)
    layout = {"context": 2, "share_prefixes": "tree"}
    results = _run_with(a_prefix_is_seen_by_the_rank_that_holds_it, case, layout, tmp_path)
    with pytest.raises(AssertionError):
        check_scores(case, results)


@pytest.mark.parametrize(("family", "layout"), [("qwen3", ALLGATHER), ("qwen3_moe", INTERLEAVED)])
def test_without_a_bug_nothing_fails(family: str, layout: Settings, cases: Any, tmp_path: Path) -> None:
    """Otherwise a broken harness would look like a caught mutation. The matrix itself covers every layout."""
    case = cases(family, layers_of(layout))
    results = _run_with(no_bug, case, layout, tmp_path)
    check_scores(case, results)
    check_gradients(case, results)


def _run_with(bug: Callable[[], None], case: Case, layout: Settings, directory: Path) -> list[RankResult]:
    return run_case(case, layout, directory, partial(train_with, bug), steps=0)


def train_with(bug: Callable[[], None], placement: RankPlacement, *arguments: Any) -> RankResult:
    bug()
    return train_rank(placement, *arguments)


def no_bug() -> None:
    pass


def history_with(bug: Callable[[], None], placement: RankPlacement, *arguments: Any) -> History:
    bug()
    return history(placement, *arguments)
