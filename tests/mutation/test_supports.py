"""Put in bugs of truncated sampling, one at a time: the comparison with the float64 reference must notice each."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from backends.common.step.packs import ResponseRows
from slime_like.algorithms import head
from slime_like.algorithms.supports import forbid_outside
from slime_like.interfaces import RankPlacement
from tests.parallel.parity import Case, check_scores, run_case
from tests.parallel.steps import RankResult, train_rank
from tests.parallel.test_supports import case as case


def the_supports_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    correct = ResponseRows.of
    patch.setattr(ResponseRows, "of", lambda *given: _with_supports(correct(*given), lambda _: None))


def supports_belong_to_the_row_before(patch: pytest.MonkeyPatch) -> None:
    correct = ResponseRows.of
    patch.setattr(ResponseRows, "of", lambda *given: _with_supports(correct(*given), lambda each: each.roll(1, 0)))


def every_rank_counts_columns_from_zero(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(head, "forbid_outside", lambda x, supports, start: forbid_outside(x, supports, 0))


def the_trainer_truncates_its_own_logits(patch: pytest.MonkeyPatch) -> None:
    def own(x: Tensor, supports: Tensor, start: int) -> Tensor:
        counts = (supports >= 0).sum(1)
        ranks = x.argsort(1, descending=True).argsort(1)
        return x.masked_fill_((ranks >= counts[:, None]) & (counts > 0)[:, None], float("-inf"))

    patch.setattr(head, "forbid_outside", own)


def _with_supports(rows: Any, change: Any) -> Any:
    rows.supports = change(rows.supports)
    return rows


BUGS = {
    each.__name__: each
    for each in (
        the_supports_are_forgotten,
        supports_belong_to_the_row_before,
        every_rank_counts_columns_from_zero,
        the_trainer_truncates_its_own_logits,
    )
}


def _buggy(placement: RankPlacement, *arguments: Any, bug: str) -> RankResult:
    with pytest.MonkeyPatch.context() as patch:
        BUGS[bug](patch)
        return train_rank(placement, *arguments)


@pytest.mark.parametrize("bug", BUGS)
def test_the_comparison_catches(bug: str, case: Case, tmp_path: Path) -> None:
    layout = {"tensor": 2, "sequence": True} if "rank" in bug else {}
    results = run_case(case, layout, tmp_path, partial(_buggy, bug=bug), steps=1)
    with pytest.raises(AssertionError, match="logprobs of pack"):
        check_scores(case, results)
