"""Put known bugs of FSDP training into the trainer, one at a time: its parity tests must notice each."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from backends.common import linear_attention
from backends.common.attention.packed_attention import AttentionKind, PackedAttention
from backends.common.attention.prefixes import PrefixAttention
from backends.common.linear_attention import Boundaries, Recurrence
from backends.fsdp import micro_batch, optimizer, trainer
from backends.fsdp import model as fsdp_model
from slime_like.algorithms.context import ContextShard
from slime_like.config import RunConfig
from slime_like.errors import ConfigError
from slime_like.interfaces import RankPlacement
from tests.mutation.planted import Bug, Patch, no_bug, require_caught, run_planted
from tests.mutation.test_trainer import Mutation, loss_is_scaled_by_the_context_size
from tests.mutation.test_trainer import cases as cases
from tests.parallel.parity import GRADIENT_BOUND, Case, check_scores, check_tensors, fsdp_config
from tests.parallel.steps import RankResult, train_rank
from tests.support.shards import local_boundaries


# ------------------------------------------------------------------------------------------------------------ the bugs
def sequences_begin_where_the_rank_begins(patch: Patch) -> None:
    def attention(name: str, shard: ContextShard, group: Any) -> PrefixAttention:
        return PrefixAttention.of(local_boundaries(shard), None, range(shard.tokens.numel()), group)

    patch.setattr(micro_batch, "choose_attention", attention)


def positions_begin_anew_on_every_rank(patch: Patch) -> None:
    correct = trainer.FsdpTrainer._forward

    def forward(self: trainer.FsdpTrainer, batch: micro_batch.FsdpInput) -> tuple[Tensor, ...]:
        batch.shard.position_ids = torch.arange(batch.shard.tokens.numel(), dtype=torch.int32)
        return correct(self, batch)

    patch.setattr(trainer.FsdpTrainer, "_forward", forward)


def ranks_are_averaged(patch: Patch) -> None:
    """As by FSDP's default."""
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)


def the_denominator_is_multiplied_by_the_replicas(patch: Patch) -> None:
    correct = trainer.FsdpTrainer.finalize_gradients

    def finalize(self: trainer.FsdpTrainer, denominator: float) -> None:
        correct(self, denominator * self.groups.replicas.size())

    patch.setattr(trainer.FsdpTrainer, "finalize_gradients", finalize)


def only_the_last_micro_batch_is_summed(patch: Patch) -> None:
    """Leaves out the gradients of earlier ones, as if every window started anew."""
    correct = fsdp_model.FsdpModel.sum_gradients

    def sum_gradients(self: fsdp_model.FsdpModel, now: bool) -> None:
        correct(self, now)
        for module in self.modules():
            if now and isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    for parameter in group.fsdp_params:
                        parameter.unsharded_accumulated_grad = None
                        if hasattr(parameter, "_unsharded_param"):
                            parameter._unsharded_param.grad = None

    patch.setattr(fsdp_model.FsdpModel, "sum_gradients", sum_gradients)


def gradients_are_not_synchronised(patch: Patch) -> None:
    """Every rank continues with its rows of its own unreduced gradient."""

    def reduce(
        params: Any, grads: Any, group: Any, stream: Any, comm: Any, dtype: Any, reduce_dtype: Any, *rest: Any
    ) -> Any:
        for parameter, gradient in zip(params, grads, strict=True):
            rows = -(-gradient.shape[0] // group.size())
            part = gradient[group.rank() * rows : (group.rank() + 1) * rows].contiguous()
            shard = parameter.to_sharded_dtensor(part)
            known = parameter.sharded_param.grad
            parameter.sharded_param.grad = shard if known is None else known + shard
        grads.clear()
        return grads, None, stream, None, None, None, None

    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    patch.setattr(_fsdp_param_group, "foreach_reduce", reduce)


def the_norm_is_the_ranks_own(patch: Patch) -> None:
    """Ranks clip differently, so the shards of one update are scaled differently."""

    def norm(self: optimizer.FsdpOptimizer) -> float:
        return float(torch.stack([g.norm() for g in self.gradients().values() if g.numel()]).norm())

    patch.setattr(optimizer.FsdpOptimizer, "gradient_norm", norm)


def sinks_are_left_out(patch: Patch) -> None:
    """They stay parameters, but have no share of any softmax."""
    correct = PackedAttention.attend

    def attend(self: PackedAttention, *inputs: Any) -> Tensor:
        return correct(self, *inputs[:-1], inputs[-1] - 1e4)

    patch.setattr(PackedAttention, "attend", attend)


def windows_are_one_key_wider(patch: Patch) -> None:
    """As by a window that doesn't count a query's own key."""
    correct = AttentionKind.within

    def within(self: AttentionKind, longest: int) -> int | None:
        window = correct(self, longest)
        return None if window is None else window + 1

    patch.setattr(AttentionKind, "within", within)


def windows_end_where_the_rank_begins(patch: Patch) -> None:
    correct = PrefixAttention._windowed

    def windowed(self: PrefixAttention, scores: AttentionKind) -> Any:
        if (found := correct(self, scores)) is None:
            return None
        pairing, rows = found
        return replace(pairing, k=self.local), slice(rows.start, rows.start)

    patch.setattr(PrefixAttention, "_windowed", windowed)


def the_convolution_sees_the_sequence_before(patch: Patch) -> None:
    correct = linear_attention.causal_conv

    def conv(x: Tensor, weight: Tensor, boundaries: Boundaries) -> Tensor:
        return correct(x, weight, Boundaries.of(boundaries.cu_seqlens[[0, -1]]))

    patch.setattr(linear_attention, "causal_conv", conv)


def a_pack_has_one_state(patch: Patch) -> None:
    correct = linear_attention.gated_delta_net

    def net(*inputs: Any) -> Tensor:
        return correct(*inputs[:-1], Boundaries.of(inputs[-1].cu_seqlens[[0, -1]]))

    patch.setattr(linear_attention, "gated_delta_net", net)


def states_begin_where_the_rank_begins(patch: Patch) -> None:
    def recurrence(cls: Any, shard: ContextShard, group: Any) -> Recurrence:
        tokens = torch.arange(shard.tokens.numel())
        return Recurrence(Boundaries.of(local_boundaries(shard)), tokens, tokens, None)

    patch.setattr(Recurrence, "of", classmethod(recurrence))


# ---------------------------------------------------------------------------------------------------------- the matrix
def check_whole_gradients(case: Case, results: list[RankResult]) -> None:
    for result in results:
        check_tensors(result.gradients, case.expected.gradients, GRADIENT_BOUND)


def check_norm(case: Case, results: list[RankResult]) -> None:
    expected = float(torch.stack([gradient.norm() for gradient in case.expected.gradients.values()]).norm())
    for result in results:
        assert result.stats[0] is not None
        assert float(result.stats[0].grad_norm) == pytest.approx(expected, rel=1e-4)


COMPARISONS = (check_scores, check_whole_gradients, check_norm)
MUTATIONS = [
    Mutation(sequences_begin_where_the_rank_begins, "qwen3", {"context": 2}, check_scores),
    Mutation(positions_begin_anew_on_every_rank, "qwen3", {"context": 2}, check_scores),
    Mutation(ranks_are_averaged, "qwen3", {"data": 2}, check_whole_gradients),
    Mutation(the_denominator_is_multiplied_by_the_replicas, "qwen3", {"data": 2}, check_whole_gradients),
    Mutation(loss_is_scaled_by_the_context_size, "qwen3", {"context": 2}, check_whole_gradients),
    Mutation(only_the_last_micro_batch_is_summed, "qwen3", {"context": 2}, check_whole_gradients),
    Mutation(gradients_are_not_synchronised, "qwen3", {"data": 2}, check_whole_gradients),
    Mutation(the_norm_is_the_ranks_own, "qwen3", {"data": 2}, check_norm),
    Mutation(sinks_are_left_out, "gpt_oss", {}, check_scores),
    Mutation(windows_are_one_key_wider, "gpt_oss", {}, check_scores),
    Mutation(windows_end_where_the_rank_begins, "gpt_oss", {"context": 2}, check_scores),
    Mutation(the_convolution_sees_the_sequence_before, "qwen3_5_text", {}, check_scores),
    Mutation(a_pack_has_one_state, "qwen3_5_text", {}, check_scores),
    Mutation(states_begin_where_the_rank_begins, "qwen3_5_text", {"context": 2}, check_scores),
    Mutation(no_bug, "gpt_oss", {}, None),
    Mutation(no_bug, "qwen3", {"data": 2}, None),
]


def _unchecked(bug: Bug, patch: Patch) -> None:
    """Put in a bug without the check at the start, which would notice wrong forward passes first."""
    patch.setattr(trainer.FsdpTrainer, "_require_own_forward", lambda self: None)
    bug(patch)


@pytest.fixture(scope="module")
def results(cases: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[RankResult]]:
    directory, tasks = tmp_path_factory.mktemp("ranks"), {}
    for mutation in MUTATIONS:
        case, steps = cases(mutation.family), int(mutation.caught_by in (check_norm, None))
        config = fsdp_config(case, directory, mutation.layout)
        tasks[str(mutation)] = (partial(_unchecked, mutation.bug), (config, case.packs(), case.denominator, steps))
    return run_planted(train_rank, directory, tasks)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_the_parity_tests_catch(mutation: Mutation, cases: Any, results: dict[str, list[RankResult]]) -> None:
    require_caught(COMPARISONS, mutation.caught_by, cases(mutation.family), results[str(mutation)])


def test_a_wrong_forward_pass_is_noticed_at_the_start(cases: Any, tmp_path: Path) -> None:
    config = fsdp_config(cases("qwen3"), tmp_path, {"context": 2})
    bugs = (sequences_begin_where_the_rank_begins, positions_begin_anew_on_every_rank)
    found = run_planted(_start, tmp_path, {bug: (bug, (config,)) for bug in bugs})
    for message, _ in found.values():
        assert "differ from those of transformers' own forward pass" in message


def _start(placement: RankPlacement, config: RunConfig) -> str:
    built = trainer.FsdpTrainer(config, placement)
    try:
        built.setup()
    except ConfigError as error:
        return str(error)
    finally:
        built.shutdown()
    return "nothing"
