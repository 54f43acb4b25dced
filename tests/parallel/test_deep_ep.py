"""Megatron's dispatcher with DeepEP in our mixture of experts, against the float64 reference.

DeepEP exists for CUDA only. Stand-ins for the two functions that Megatron calls exchange the same tokens over gloo:
each goes once to every rank that has some of its experts. DeepEP itself is not tested, and has never run.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
from torch import Tensor

from backends.megatron import model as construction
from slime_like.config import RunConfig
from slime_like.interfaces import RankPlacement
from tests.parallel.harness import run_case
from tests.parallel.layouts import Settings
from tests.parallel.steps import RankResult, train_rank


class _AllTokens(torch.autograd.Function):
    """Gathers all ranks' (T, ...) rows, in the order of ranks. ``_OwnSum`` is its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _OwnSum.apply(grads[0], ctx.group), None


class _OwnSum(torch.autograd.Function):
    """Sums rows over the ranks, and returns this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, summed = group, x.clone()
        dist.all_reduce(summed, group=group)
        return summed.chunk(group.size())[group.rank()].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllTokens.apply(grads[0], ctx.group), None


def _dispatch(
    x: Tensor, token_indices: Tensor, token_probs: Tensor, num_experts: int, group: Any, **unused: bool
) -> tuple[Any, ...]:
    """Return the rows for this rank's experts, (R, k) experts there (-1: another rank's) and probabilities, the number
    of rows of each expert, and what ``_combine`` needs."""
    assert token_probs.dtype == torch.float32
    local = num_experts // group.size()
    experts = _AllTokens.apply(token_indices, group) - group.rank() * local
    experts = experts.masked_fill((experts < 0) | (experts >= local), -1)
    kept = (experts >= 0).any(dim=1).nonzero().squeeze(1)
    rows, probs, experts = _AllTokens.apply(x, group)[kept], _AllTokens.apply(token_probs, group)[kept], experts[kept]
    counts = torch.bincount(experts[experts >= 0], minlength=local)
    return rows, experts, probs.masked_fill(experts < 0, 0.0), counts, (kept, len(x) * group.size())


def _combine(x: Tensor, group: Any, handle: tuple[Tensor, int], **unused: bool) -> tuple[Tensor, None]:
    kept, tokens = handle
    return _OwnSum.apply(x.new_zeros(tokens, x.shape[1]).index_copy(0, kept, x), group), None


def _train(placement: RankPlacement, config: RunConfig, *arguments: Any) -> RankResult:
    """Train in a rank that believes to have DeepEP and a GPU."""
    token_dispatcher.fused_dispatch, token_dispatcher.fused_combine = _dispatch, _combine
    token_dispatcher.set_deepep_num_sms = lambda count: None
    # Megatron compiles it.
    MoEFlexTokenDispatcher.dispatch_preprocess = MoEFlexTokenDispatcher.dispatch_preprocess.__wrapped__
    construction.is_installed = lambda module: module == "deep_ep"  # type: ignore[assignment]
    choose = construction._fusions
    construction._fusions = lambda trainer, dimensions, on_cuda: choose(trainer, dimensions, True)
    used = []

    def dispatch(*given: Any, **options: Any) -> Any:
        used.append(True)
        return _dispatch(*given, **options)

    token_dispatcher.fused_dispatch = dispatch
    result = train_rank(placement, config, *arguments)
    assert used
    return result


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2, "sequence": True, "expert": 2},
        pytest.param({"expert": 2, "context": 2}, marks=pytest.mark.acceptance),
    ],
)
def test_experts_of_other_ranks_compute_the_reference(layout: Settings, cases: Any, tmp_path: Path) -> None:
    case = cases("plain", "qwen3_moe")
    results = run_case(case, layout, tmp_path, _train)
    for comparison in case.checks:
        comparison(case, results)
