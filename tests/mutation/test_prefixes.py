"""Put in bugs of shared prefixes, one at a time: the comparison with a pack that shares nothing must notice each."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from backends.common.attention.prefixes import PrefixAttention
from backends.common.step.packs import ResponseRows
from backends.fsdp import micro_batch
from slime_like.algorithms.context import ContextShard
from tests.support.prefixes import SmallModel, check_gradients, group_of_four

Bug = Callable[[pytest.MonkeyPatch], None]


def a_response_attends_to_its_sibling(patch: pytest.MonkeyPatch) -> None:
    correct = PrefixAttention.of

    def of(boundaries: Tensor, parents: Tensor, *others: Any) -> PrefixAttention:
        chained = torch.where(parents == 0, torch.arange(len(parents)) - 1, parents)
        return correct(boundaries, chained, *others)

    patch.setattr(PrefixAttention, "of", of)


def positions_restart_behind_the_prefix(patch: pytest.MonkeyPatch) -> None:
    correct = micro_batch.split_for_context_parallel

    def split(*arguments: Any, **options: Any) -> ContextShard:
        shard = correct(*arguments, **options)
        boundaries = shard.cu_seqlens_padded
        begins = boundaries[:-1].repeat_interleave(boundaries.diff())
        return replace(shard, position_ids=torch.arange(len(begins), dtype=torch.int32) - begins)

    patch.setattr(micro_batch, "split_for_context_parallel", split)


def the_prompts_last_row_counts_once(patch: pytest.MonkeyPatch) -> None:
    def spread(self: ResponseRows, scored: Tensor) -> Tensor:
        if self.repeats is None:
            return scored
        rows = self.repeats.tolist()
        again = torch.tensor([row in rows[:place] for place, row in enumerate(rows)])
        every = scored.index_select(0, self.repeats)
        return torch.where(again[:, None], every.detach(), every)

    patch.setattr(ResponseRows, "spread", spread)


def prefixes_have_no_gradient_of_what_follows(patch: pytest.MonkeyPatch) -> None:
    correct = PrefixAttention.backward

    def backward(self: PrefixAttention, *arguments: Any) -> tuple[Tensor, ...]:
        whole, local = correct(self, *arguments), correct(replace(self, levels=()), *arguments)
        return whole[0], *local[1:]

    patch.setattr(PrefixAttention, "backward", backward)


MUTATIONS: list[tuple[Bug, Literal["scores", "gradients"]]] = [
    (a_response_attends_to_its_sibling, "scores"),
    (positions_restart_behind_the_prefix, "scores"),
    (the_prompts_last_row_counts_once, "gradients"),
    (prefixes_have_no_gradient_of_what_follows, "gradients"),
]


@pytest.fixture(scope="module")
def model() -> SmallModel:
    return SmallModel()


@pytest.mark.parametrize(("bug", "caught_by"), MUTATIONS, ids=lambda value: getattr(value, "__name__", None))
def test_the_comparison_catches(
    bug: Bug, caught_by: Literal["scores", "gradients"], model: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    if caught_by == "scores":
        with pytest.raises(AssertionError, match="logprobs"):
            model.check_scores(group_of_four(), "prompts")
    else:
        results = model.check_scores(group_of_four(), "prompts")
        with pytest.raises(AssertionError):
            check_gradients(*results)
