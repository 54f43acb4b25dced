"""Put known bugs of FSDP training into the trainer, one at a time: its parity tests must notice each.

A bug is put in by replacing one function in the forked ranks, and ends with them. The parity tests' comparison named
for it must then fail, and the earlier comparisons must not: a crash is no proof.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from backends.common import linear_attention
from backends.common.attention.packed_attention import PackedAttention, Scores
from backends.common.attention.prefixes import PrefixAttention
from backends.common.linear_attention import Boundaries, Recurrence
from backends.fsdp import micro_batch, optimizer, trainer
from backends.fsdp import model as fsdp_model
from slime_like.algorithms.context import ContextShard
from slime_like.config import RunConfig
from slime_like.errors import ConfigError
from slime_like.interfaces import RankPlacement
from tests.mutation.test_trainer import Mutation, loss_is_scaled_by_the_context_size, no_bug, train_with
from tests.mutation.test_trainer import cases as cases
from tests.parallel.parity import GRADIENT_BOUND, Case, Settings, check_scores, check_tensors, fsdp_config
from tests.parallel.ranks import run_ranks
from tests.parallel.steps import RankResult
from tests.support.shards import local_boundaries


# ------------------------------------------------------------------------------------------------------------ the bugs
def sequences_begin_where_the_rank_begins() -> None:
    def attention(name: str, shard: ContextShard, group: Any) -> PrefixAttention:
        return PrefixAttention.of(local_boundaries(shard), None, range(shard.tokens.numel()), group)

    micro_batch.choose_attention = attention


def positions_begin_anew_on_every_rank() -> None:
    correct = trainer.FsdpTrainer._forward

    def forward(self: trainer.FsdpTrainer, batch: micro_batch.ModelInput) -> tuple[Tensor, ...]:
        batch.shard.position_ids = torch.arange(batch.shard.tokens.numel(), dtype=torch.int32)
        return correct(self, batch)

    trainer.FsdpTrainer._forward = forward  # type: ignore[method-assign]


def ranks_are_averaged() -> None:
    """As by FSDP's default."""
    FSDPModule.set_gradient_divide_factor = lambda self, factor: None  # type: ignore[method-assign]


def the_denominator_is_multiplied_by_the_replicas() -> None:
    correct = trainer.FsdpTrainer.finalize_gradients

    def finalize(self: trainer.FsdpTrainer, denominator: float) -> None:
        correct(self, denominator * self.groups.replicas.size())

    trainer.FsdpTrainer.finalize_gradients = finalize  # type: ignore[method-assign]


def only_the_last_micro_batch_is_summed() -> None:
    """Leaves out the gradients of earlier ones, as if every window started anew."""
    correct = fsdp_model.LogprobModel.sum_gradients

    def sum_gradients(self: fsdp_model.LogprobModel, now: bool) -> None:
        correct(self, now)
        for module in self.modules():
            if now and isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    for parameter in group.fsdp_params:
                        parameter.unsharded_accumulated_grad = None
                        if hasattr(parameter, "_unsharded_param"):
                            parameter._unsharded_param.grad = None

    fsdp_model.LogprobModel.sum_gradients = sum_gradients  # type: ignore[method-assign]


def gradients_are_not_synchronised() -> None:
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

    _fsdp_param_group.foreach_reduce = reduce


def the_norm_is_the_ranks_own() -> None:
    """Ranks clip differently, so the shards of one update are scaled differently."""

    def norm(self: optimizer.Optimizer) -> float:
        return float(torch.stack([g.norm() for g in self.gradients().values() if g.numel()]).norm())

    optimizer.Optimizer.gradient_norm = norm  # type: ignore[method-assign]


def sinks_are_left_out() -> None:
    """They stay parameters, but have no share of any softmax."""
    correct = PackedAttention.attend

    def attend(self: PackedAttention, *inputs: Any) -> Tensor:
        return correct(self, *inputs[:-1], inputs[-1] - 1e4)

    PackedAttention.attend = attend  # type: ignore[method-assign]


def windows_are_one_key_wider() -> None:
    """As by a window that doesn't count a query's own key."""
    correct = Scores.within

    def within(self: Scores, longest: int) -> int | None:
        window = correct(self, longest)
        return None if window is None else window + 1

    Scores.within = within  # type: ignore[method-assign]


def windows_end_where_the_rank_begins() -> None:
    correct = PrefixAttention._windowed

    def windowed(self: PrefixAttention, scores: Scores) -> Any:
        if (found := correct(self, scores)) is None:
            return None
        pairing, rows = found
        return replace(pairing, k=self.local), slice(rows.start, rows.start)

    PrefixAttention._windowed = windowed  # type: ignore[method-assign]


def the_convolution_sees_the_sequence_before() -> None:
    correct = linear_attention.causal_conv

    def conv(x: Tensor, weight: Tensor, boundaries: Boundaries) -> Tensor:
        return correct(x, weight, Boundaries.of(boundaries.cu_seqlens[[0, -1]]))

    linear_attention.causal_conv = conv


def a_pack_has_one_state() -> None:
    correct = linear_attention.gated_delta_net

    def net(*inputs: Any) -> Tensor:
        return correct(*inputs[:-1], Boundaries.of(inputs[-1].cu_seqlens[[0, -1]]))

    linear_attention.gated_delta_net = net


def states_begin_where_the_rank_begins() -> None:
    def recurrence(cls: Any, shard: ContextShard, group: Any) -> Recurrence:
        tokens = torch.arange(shard.tokens.numel())
        return Recurrence(Boundaries.of(local_boundaries(shard)), tokens, tokens, None)

    Recurrence.of = classmethod(recurrence)  # type: ignore[method-assign, assignment]


# ---------------------------------------------------------------------------------------------------------- the matrix
MUTATIONS = [
    Mutation(sequences_begin_where_the_rank_begins, "qwen3", {"context": 2}, "scores"),
    Mutation(positions_begin_anew_on_every_rank, "qwen3", {"context": 2}, "scores"),
    Mutation(ranks_are_averaged, "qwen3", {"data": 2}, "gradients"),
    Mutation(the_denominator_is_multiplied_by_the_replicas, "qwen3", {"data": 2}, "gradients"),
    Mutation(loss_is_scaled_by_the_context_size, "qwen3", {"context": 2}, "gradients"),
    Mutation(only_the_last_micro_batch_is_summed, "qwen3", {"context": 2}, "gradients"),
    Mutation(gradients_are_not_synchronised, "qwen3", {"data": 2}, "gradients"),
    Mutation(the_norm_is_the_ranks_own, "qwen3", {"data": 2}, "norm"),
    Mutation(sinks_are_left_out, "gpt_oss", {}, "scores"),
    Mutation(windows_are_one_key_wider, "gpt_oss", {}, "scores"),
    Mutation(windows_end_where_the_rank_begins, "gpt_oss", {"context": 2}, "scores"),
    Mutation(the_convolution_sees_the_sequence_before, "qwen3_5_text", {}, "scores"),
    Mutation(a_pack_has_one_state, "qwen3_5_text", {}, "scores"),
    Mutation(states_begin_where_the_rank_begins, "qwen3_5_text", {"context": 2}, "scores"),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.bug.__name__)
def test_the_parity_tests_catch(mutation: Mutation, cases: Any, tmp_path: Path) -> None:
    case = cases(mutation.family)
    results = _run_with(mutation.bug, case, mutation.layout, tmp_path, steps=int(mutation.caught_by == "norm"))
    if mutation.caught_by != "scores":
        check_scores(case, results)
    if mutation.caught_by == "norm":
        _check_gradients(case, results)
    comparison = {"scores": check_scores, "gradients": _check_gradients, "norm": _check_norm}[mutation.caught_by]
    with pytest.raises(AssertionError):
        comparison(case, results)


@pytest.mark.parametrize("bug", [sequences_begin_where_the_rank_begins, positions_begin_anew_on_every_rank])
def test_a_wrong_forward_pass_is_noticed_at_the_start(bug: Callable[[], None], cases: Any, tmp_path: Path) -> None:
    config = fsdp_config(cases("qwen3"), tmp_path, {"context": 2})
    (message, _) = run_ranks(_start_with, 2, tmp_path / "ranks", bug, config)
    assert "differ from those of transformers' own forward pass" in message


def _start_with(placement: RankPlacement, bug: Callable[[], None], config: RunConfig) -> str:
    bug()
    built = trainer.FsdpTrainer(config, placement)
    try:
        built.setup()
    except ConfigError as error:
        return str(error)
    finally:
        built.shutdown()
    return "nothing"


def test_without_a_bug_nothing_fails(cases: Any, tmp_path: Path) -> None:
    """Otherwise a broken harness would look like a caught mutation."""
    case = cases("qwen3")
    results = _run_with(no_bug, case, {"data": 2}, tmp_path)
    check_scores(case, results)
    _check_gradients(case, results)
    _check_norm(case, results)


def _run_with(
    bug: Callable[[], None], case: Case, layout: Settings, directory: Path, steps: int = 1
) -> list[RankResult]:
    config = fsdp_config(case, directory, layout)
    world = config.trainer.parallel.world_size
    arguments = (config, case.packs(), case.denominator, steps)
    return run_ranks(partial(_train_unchecked_with, bug), world, directory / "ranks", *arguments)


def _check_gradients(case: Case, results: list[RankResult]) -> None:
    for result in results:
        check_tensors(result.gradients, case.expected.gradients, GRADIENT_BOUND)


def _check_norm(case: Case, results: list[RankResult]) -> None:
    expected = float(torch.stack([gradient.norm() for gradient in case.expected.gradients.values()]).norm())
    for result in results:
        assert result.stats[0] is not None
        assert float(result.stats[0].grad_norm) == pytest.approx(expected, rel=1e-4)


def _train_unchecked_with(bug: Callable[[], None], placement: RankPlacement, *arguments: Any) -> RankResult:
    # This check would notice wrong forward passes first; here the parity tests must.
    trainer.FsdpTrainer._require_own_forward = lambda self: None  # type: ignore[method-assign]
    return train_with(bug, placement, *arguments)
