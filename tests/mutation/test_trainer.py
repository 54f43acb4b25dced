"""Put known bugs of parallel training into the trainer, one at a time: the parity matrix must notice each.

Not covered: CUDA kernels, several hosts.
"""

import importlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.attention.packed_attention import LocalAttention
from backends.common.attention.prefixes import PrefixAttention
from backends.common.attention.ring_flash_attn import Llama3Segments, RingFlashAttention
from backends.common.linear_attention import Boundaries, Recurrence
from backends.common.step import packs
from backends.common.step.balance import BalanceLoss, ExpertLoads, RoutedTokens
from backends.megatron import micro_batch, state
from backends.megatron.families import gated_delta
from backends.megatron.norm import RMSNorm, rms_norm
from backends.megatron.router import Dispatcher
from backends.megatron.trainer import MegatronTrainer
from slime_like.algorithms import context
from slime_like.trajectory import PackedTrajectory
from tests.mutation.planted import Bug, Comparison, Patch, no_bug, require_caught, run_planted
from tests.parallel.parity import (
    Case,
    Settings,
    check_biases,
    check_gradients,
    check_scores,
    layers_of,
    make_case,
    task_of,
)
from tests.parallel.shared_prefixes import shared_case
from tests.parallel.steps import RankResult, train_rank
from tests.parallel.test_router_biases import check_roles, history, history_task
from tests.support.shards import local_boundaries

pytestmark = pytest.mark.timeout(900)  # one fork runs many cases

# By name, because the package has a function of the same name.
finalization = importlib.import_module("megatron.core.distributed.finalize_model_grads")
_QK_NORMS = ("q_layernorm", "k_layernorm")


# ------------------------------------------------------------------------------------------------------------ the bugs
def logits_are_read_at_the_token_itself(patch: Patch) -> None:
    correct = context.response_logit_index
    patch.setattr(context, "response_logit_index", lambda packed: correct(packed) + 1)


def positions_stay_behind_the_zigzag(patch: Patch) -> None:
    correct = micro_batch.rotary_table

    def table(inv_freq: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return correct(inv_freq, torch.arange(positions.numel(), device=positions.device), dtype)

    patch.setattr(micro_batch, "rotary_table", table)


def ring_gets_contiguous_chunks(patch: Patch) -> None:
    correct = context._local_coordinates

    def coordinates(cu_padded: Tensor, size: int, rank: int, layout: str) -> tuple[Tensor, Tensor]:
        segment, offset = correct(cu_padded, 1, 0, "zigzag")
        local = torch.div(cu_padded.diff(), size, rounding_mode="floor")[segment]
        mine = torch.div(offset, local, rounding_mode="floor") == rank
        return segment[mine], offset[mine]

    patch.setattr(context, "_local_coordinates", coordinates)


def sequences_begin_where_the_rank_begins(patch: Patch) -> None:
    def attention(name: str, shard: context.ContextShard, group: dist.ProcessGroup) -> PrefixAttention:
        return PrefixAttention.of(local_boundaries(shard), None, range(shard.tokens.numel()), group)

    patch.setattr(micro_batch, "choose_attention", attention)


def a_prefix_is_seen_by_the_rank_that_holds_it(patch: Patch) -> None:
    correct = PrefixAttention.of

    def of(boundaries: Tensor, parents: Tensor | None, part: range, group: dist.ProcessGroup) -> PrefixAttention:
        if parents is None:
            return correct(boundaries, parents, part, group)
        held = (boundaries[:-1] >= part.start) & (boundaries[1:] <= part.stop)
        return correct(boundaries, torch.where(held[parents.clamp_min(0)], parents, -1), part, group)

    patch.setattr(PrefixAttention, "of", of)


def the_package_is_given_the_ranks_own_boundaries(patch: Patch) -> None:
    def attention(name: str, shard: context.ContextShard, group: dist.ProcessGroup) -> RingFlashAttention:
        return RingFlashAttention(Llama3Segments.of(local_boundaries(shard), 0, 1), group)

    patch.setattr(micro_batch, "choose_attention", attention)


def the_package_is_given_zigzag_chunks(patch: Patch) -> None:
    patch.setattr(micro_batch, "context_layout_of", lambda attention: "zigzag")


def padding_is_routed_like_the_last_sequence(patch: Patch) -> None:
    correct = RoutedTokens.of

    def of(pack: PackedTrajectory, *arguments: Any) -> RoutedTokens | None:
        tokens = correct(pack, *arguments)
        return tokens and replace(tokens, sequence=tokens.sequence.clamp(max=pack.num_sequences - 1))

    patch.setattr(RoutedTokens, "of", of)


def fillers_are_routed_like_samples(patch: Patch) -> None:
    correct = RoutedTokens.of

    def of(pack: PackedTrajectory, *arguments: Any) -> RoutedTokens | None:
        return correct(replace(pack, is_filler=False), *arguments)

    patch.setattr(RoutedTokens, "of", of)


def every_micro_batch_takes_its_own_mean(patch: Patch) -> None:
    correct = MegatronTrainer._micro_batch_loss

    def loss(self: MegatronTrainer, batch: micro_batch.ModelInput, output: Tensor) -> tuple[Tensor, Tensor, None]:
        summed, *rest = correct(self, batch, output)
        return summed / batch.pack.token_weights.sum().clamp_min(1e-6), *rest

    patch.setattr(MegatronTrainer, "_micro_batch_loss", loss)


def replicas_are_averaged(patch: Patch) -> None:
    correct = MegatronTrainer.finalize_gradients

    def finalize(self: MegatronTrainer, denominator: float) -> None:
        correct(self, denominator * self.coordinates.data_size)

    patch.setattr(MegatronTrainer, "finalize_gradients", finalize)


def loss_is_scaled_by_the_context_size(patch: Patch) -> None:
    correct = packs.join_context_parts

    def join(part: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = correct(part, group)
        return whole + (group.size() - 1) * (whole - whole.detach())

    patch.setattr(packs, "join_context_parts", join)


def tied_embedding_is_not_reduced(patch: Patch) -> None:
    patch.setattr(finalization, "_allreduce_word_embedding_grads", lambda *arguments: None)


def query_and_key_norms_are_not_reduced(patch: Patch) -> None:
    correct = finalization._allreduce_non_tensor_model_parallel_grads

    def reduce(model: Any, *arguments: Any) -> None:
        norms = [p for chunk in model for name, p in chunk.named_parameters() if name.split(".")[-2] in _QK_NORMS]
        before = [parameter.main_grad.clone() for parameter in norms]
        correct(model, *arguments)
        for parameter, gradient in zip(norms, before, strict=True):
            parameter.main_grad.copy_(gradient)

    patch.setattr(finalization, "_allreduce_non_tensor_model_parallel_grads", reduce)


def norms_of_value_heads_are_not_reduced(patch: Patch) -> None:
    patch.setattr(gated_delta, "copy_to_tensor_model_parallel_region", lambda weight: weight)


def states_begin_where_the_rank_begins(patch: Patch) -> None:
    def recurrence(cls: Any, shard: context.ContextShard, group: dist.ProcessGroup) -> Recurrence:
        tokens = torch.arange(shard.tokens.numel())
        return Recurrence(Boundaries.of(local_boundaries(shard)), tokens, tokens, None)

    patch.setattr(Recurrence, "of", classmethod(recurrence))


def routers_loss_is_divided_by_the_denominator(patch: Patch) -> None:
    correct = BalanceLoss.of_step
    patch.setattr(BalanceLoss, "of_step", lambda coefficient, denominator, *rest: correct(coefficient, 1.0, *rest))


def experts_shares_stay_in_the_order_of_tokens(patch: Patch) -> None:
    correct = Dispatcher.dispatch_preprocess

    def preprocess(self: Dispatcher, hidden: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return correct(self, hidden, routing_map, probs)[0], probs[routing_map]

    patch.setattr(Dispatcher, "dispatch_preprocess", preprocess)


def biases_move_towards_the_load(patch: Patch) -> None:
    correct = ExpertLoads.move

    def move(self: ExpertLoads, biases: dict[int, Tensor]) -> None:
        self.rate = -self.rate
        correct(self, biases)

    patch.setattr(ExpertLoads, "move", move)


def recomputed_layers_count_twice(patch: Patch) -> None:
    correct = RoutedTokens.count

    def count(self: RoutedTokens, *arguments: Any) -> None:
        self.counted.clear()
        correct(self, *arguments)

    patch.setattr(RoutedTokens, "count", count)


def sinks_are_left_out(patch: Patch) -> None:
    correct = LocalAttention.attend

    def attend(self: LocalAttention, *arguments: Any) -> Tensor:
        return correct(self, *arguments[:5])

    patch.setattr(LocalAttention, "attend", attend)


def windows_have_one_more_key(patch: Patch) -> None:
    correct = LocalAttention.attend

    def attend(self: LocalAttention, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Any, *sinks: Any) -> Tensor:
        return correct(self, q, k, v, scale, window and window + 1, *sinks)

    patch.setattr(LocalAttention, "attend", attend)


def norms_multiply_by_the_weight_alone(patch: Patch) -> None:
    patch.setattr(RMSNorm, "forward", lambda self, x: rms_norm(x, self.weight, self.eps))


def biases_are_not_weights(patch: Patch) -> None:
    patch.setattr(state, "named_weights", lambda chunk: chunk.named_parameters())


# ---------------------------------------------------------------------------------------------------------- the matrix
@dataclass(frozen=True)
class Mutation:
    """With ``bug`` in every rank, ``family`` under ``layout`` must fail ``caught_by``, if a comparison is named."""

    bug: Bug
    family: str
    layout: Settings
    caught_by: Comparison | None

    def __str__(self) -> str:
        return f"{self.bug.__name__}-{self.family}" + "".join(f"-{name}={value}" for name, value in self.layout.items())


COMPARISONS = (check_scores, check_gradients)
ALLGATHER = {"context": 2, "attention": "allgather"}
RING_FLASH_ATTN = {"context": 2, "attention": "ring_flash_attn"}
INTERLEAVED = {"pipeline": 2, "virtual_pipeline": 2}
SHARED = {"context": 2, "share_prefixes": "tree"}

MUTATIONS = [
    Mutation(logits_are_read_at_the_token_itself, "qwen3", {}, check_scores),
    Mutation(positions_stay_behind_the_zigzag, "qwen3", {"context": 2}, check_scores),
    Mutation(ring_gets_contiguous_chunks, "qwen3", {"context": 2}, check_scores),
    Mutation(sequences_begin_where_the_rank_begins, "qwen3", ALLGATHER, check_scores),
    Mutation(the_package_is_given_the_ranks_own_boundaries, "qwen3", RING_FLASH_ATTN, check_scores),
    Mutation(the_package_is_given_zigzag_chunks, "qwen3", RING_FLASH_ATTN, check_scores),
    Mutation(padding_is_routed_like_the_last_sequence, "qwen3_moe", {}, check_gradients),
    Mutation(fillers_are_routed_like_samples, "qwen3_moe", INTERLEAVED, check_gradients),
    Mutation(every_micro_batch_takes_its_own_mean, "qwen3", {}, check_gradients),
    Mutation(replicas_are_averaged, "qwen3", {"data": 2}, check_gradients),
    Mutation(loss_is_scaled_by_the_context_size, "qwen3", {"context": 2}, check_gradients),
    Mutation(tied_embedding_is_not_reduced, "qwen2", {"pipeline": 2}, check_gradients),
    Mutation(query_and_key_norms_are_not_reduced, "qwen3", {"tensor": 2, "sequence": True}, check_gradients),
    Mutation(norms_of_value_heads_are_not_reduced, "qwen3_5_text", {"tensor": 2}, check_gradients),
    Mutation(states_begin_where_the_rank_begins, "qwen3_5_text", {"context": 2}, check_scores),
    Mutation(routers_loss_is_divided_by_the_denominator, "qwen3_moe", {}, check_gradients),
    Mutation(experts_shares_stay_in_the_order_of_tokens, "qwen3_moe", {}, check_scores),
    Mutation(sinks_are_left_out, "gpt_oss", {}, check_scores),
    Mutation(windows_have_one_more_key, "mistral", {}, check_scores),
    Mutation(windows_have_one_more_key, "gemma3", {}, check_scores),
    Mutation(norms_multiply_by_the_weight_alone, "gemma3", {}, check_scores),
    Mutation(a_prefix_is_seen_by_the_rank_that_holds_it, "shared", SHARED, check_scores),
    Mutation(no_bug, "qwen3_moe", {}, None),
    *(Mutation(no_bug, family, {}, None) for family in ("gpt_oss", "mistral", "gemma3")),
    Mutation(no_bug, "qwen3_moe", INTERLEAVED, None),
]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(family: str, layers: int = 2) -> Case:
        directory = tmp_path_factory.mktemp(family)
        if family == "shared":
            return shared_case("qwen3", directory, steps=0)
        return make_case(family, directory, steps=0, layers=layers)

    return make


@pytest.fixture(scope="module")
def results(cases: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[RankResult]]:
    directory, tasks = tmp_path_factory.mktemp("ranks"), {}
    for mutation in MUTATIONS:
        case = cases(mutation.family, layers_of(mutation.layout))
        tasks[str(mutation)] = (mutation.bug, task_of(case, mutation.layout, directory, steps=0))
    return run_planted(train_rank, directory, tasks)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_the_matrix_catches(mutation: Mutation, cases: Any, results: dict[str, list[RankResult]]) -> None:
    case = cases(mutation.family, layers_of(mutation.layout))
    require_caught(COMPARISONS, mutation.caught_by, case, results[str(mutation)])


def test_the_matrix_catches_wrong_biases(tmp_path: Path) -> None:
    case = make_case("deepseek_v3_direct", tmp_path / "case", steps=1, layers=2)
    bugs: list[tuple[Bug, Settings]] = [
        (biases_move_towards_the_load, {}),
        (padding_is_routed_like_the_last_sequence, {}),
        (recomputed_layers_count_twice, {"recompute": "full"}),
        (no_bug, {}),
    ]
    tasks = {bug: (bug, task_of(case, layout, tmp_path, steps=1)) for bug, layout in bugs}
    for bug, results in run_planted(train_rank, tmp_path, tasks).items():
        require_caught((check_scores, check_biases), None if bug is no_bug else check_biases, case, results)


def test_roles_that_share_biases_are_caught(tmp_path: Path) -> None:
    tasks = {"": (biases_are_not_weights, history_task(tmp_path, "megatron"))}
    ((found,),) = run_planted(history, tmp_path, tasks).values()
    with pytest.raises(AssertionError):
        check_roles(found)
