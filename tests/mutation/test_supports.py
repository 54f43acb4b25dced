"""Put in bugs of truncated sampling, one at a time: the comparison with the float64 reference must notice each."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from backends.common.step.packs import ResponseRows
from slime_like.algorithms import head
from slime_like.algorithms.softmax import forbid_outside
from tests.mutation.planted import Bug, Patch, no_bug, run_planted
from tests.parallel.parity import Case, Settings, check_scores, task_of
from tests.parallel.steps import train_rank
from tests.parallel.test_supports import case as case


def the_supports_are_forgotten(patch: Patch) -> None:
    correct = ResponseRows.of
    patch.setattr(ResponseRows, "of", lambda *given: _with_supports(correct(*given), lambda _: None))


def supports_belong_to_the_row_before(patch: Patch) -> None:
    correct = ResponseRows.of
    patch.setattr(ResponseRows, "of", lambda *given: _with_supports(correct(*given), lambda each: each.roll(1, 0)))


def every_rank_counts_columns_from_zero(patch: Patch) -> None:
    patch.setattr(head, "forbid_outside", lambda x, supports, start: forbid_outside(x, supports, 0))


def the_trainer_truncates_its_own_logits(patch: Patch) -> None:
    def own(x: Tensor, supports: Tensor, start: int) -> Tensor:
        counts = (supports >= 0).sum(1)
        ranks = x.argsort(1, descending=True).argsort(1)
        return x.masked_fill_((ranks >= counts[:, None]) & (counts > 0)[:, None], float("-inf"))

    patch.setattr(head, "forbid_outside", own)


def _with_supports(rows: Any, change: Any) -> Any:
    rows.supports = change(rows.supports)
    return rows


BUGS: list[tuple[Bug, Settings]] = [
    (the_supports_are_forgotten, {}),
    (supports_belong_to_the_row_before, {}),
    (every_rank_counts_columns_from_zero, {"tensor": 2, "sequence": True}),
    (the_trainer_truncates_its_own_logits, {}),
    (no_bug, {}),
]


def test_the_comparison_catches(case: Case, tmp_path: Path) -> None:
    tasks = {bug: (bug, task_of(case, layout, tmp_path, steps=1)) for bug, layout in BUGS}
    for bug, results in run_planted(train_rank, tmp_path, tasks).items():
        with nullcontext() if bug is no_bug else pytest.raises(AssertionError, match="logprobs of pack"):
            check_scores(case, results)
