"""Put in bugs of shared prefixes, one at a time: the comparison with a pack that shares nothing must notice each."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.common.attention.prefixes import PrefixAttention
from backends.common.step.packs import ResponseRows
from backends.fsdp import micro_batch
from slime_like.algorithms.context import ContextShard
from tests.mutation.planted import Patch
from tests.support.prefixes import SmallModel, check_gradients, group_of_four


def a_response_attends_to_its_sibling(patch: Patch) -> None:
    correct = PrefixAttention.of

    def of(boundaries: Tensor, parents: Tensor, *others: Any) -> PrefixAttention:
        chained = torch.where(parents == 0, torch.arange(len(parents)) - 1, parents)
        return correct(boundaries, chained, *others)

    patch.setattr(PrefixAttention, "of", of)


def positions_restart_behind_the_prefix(patch: Patch) -> None:
    correct = micro_batch.split_for_context_parallel

    def split(*arguments: Any, **options: Any) -> ContextShard:
        shard = correct(*arguments, **options)
        boundaries = shard.cu_seqlens_padded
        begins = boundaries[:-1].repeat_interleave(boundaries.diff())
        return replace(shard, position_ids=torch.arange(len(begins), dtype=torch.int32) - begins)

    patch.setattr(micro_batch, "split_for_context_parallel", split)


def the_prompts_last_row_counts_once(patch: Patch) -> None:
    def spread(self: ResponseRows, scored: Tensor) -> Tensor:
        if self.repeats is None:
            return scored
        rows = self.repeats.tolist()
        again = torch.tensor([row in rows[:place] for place, row in enumerate(rows)])
        every = scored.index_select(0, self.repeats)
        return torch.where(again[:, None], every.detach(), every)

    patch.setattr(ResponseRows, "spread", spread)


def prefixes_have_no_gradient_of_what_follows(patch: Patch) -> None:
    correct = PrefixAttention.backward

    def backward(self: PrefixAttention, *arguments: Any) -> tuple[Tensor, ...]:
        whole, local = correct(self, *arguments), correct(replace(self, levels=()), *arguments)
        return whole[0], *local[1:]

    patch.setattr(PrefixAttention, "backward", backward)


def test_the_comparison_catches(monkeypatch: Patch) -> None:
    model = SmallModel()
    for bug in (a_response_attends_to_its_sibling, positions_restart_behind_the_prefix):
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match="logprobs"):
            bug(patch)
            model.check_scores(group_of_four(), "prompts")
    for bug in (the_prompts_last_row_counts_once, prefixes_have_no_gradient_of_what_follows):
        with monkeypatch.context() as patch:
            bug(patch)
            results = model.check_scores(group_of_four(), "prompts")
            with pytest.raises(AssertionError):
                check_gradients(*results)
