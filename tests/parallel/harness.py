"""Rows of features, families and layouts, each of which must compute the float64 reference; with a bug, must not.

All rows of a file that need equally many ranks run one after another in the same ranks, forked once. A bug is put into
the ranks for its row's turn only.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from backends.fsdp.trainer import FsdpTrainer
from slime_like.interfaces import RankPlacement
from tests.parallel.cases import STEPS, Case
from tests.parallel.feature_cases import FEATURES
from tests.parallel.layouts import Settings, layers_of, layout_of
from tests.parallel.ranks import run_by_size
from tests.parallel.steps import RankResult
from tests.support.planted import Bug, name_of, plant

Comparison = Callable[..., None]
Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Row:
    """A feature's case of a family, under a layout by name.

    Attributes:
        feature: name in ``FEATURES``.
        options: of the case.
        later: whether only the acceptance run includes it.
        bug, caught_by: what is put into the ranks, and the comparison that must fail; those before it must not.
        steps: number of updates.
    """

    feature: str
    family: str
    layout: str
    options: Options = ()
    later: bool = False
    bug: Bug | None = None
    caught_by: Comparison | None = None
    steps: int = STEPS

    def __str__(self) -> str:
        options = "".join(f"-{name}={value}" for name, value in self.options)
        return f"{self.feature}-{self.family}-{self.layout}{options}" + (f"-{name_of(self.bug)}" if self.bug else "")


def rows(feature: str, table: dict[str, Iterable[str]], later: bool = False, *options: tuple[str, Any]) -> list[Row]:
    """Return a feature's rows by family, each with the names of its layouts."""
    return [Row(feature, family, layout, options, later) for family, layouts in table.items() for layout in layouts]


def parameters(table: Iterable[Row]) -> pytest.MarkDecorator:
    marked = [pytest.param(row, marks=[pytest.mark.acceptance] * row.later) for row in table]
    return pytest.mark.parametrize("row", marked, ids=str)


def _row_rank(placement: RankPlacement, config: Any, row: Row, *arguments: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if row.bug is not None:  # the check at the start would notice wrong forward passes first
            patch.setattr(FsdpTrainer, "_require_own_forward", lambda self: None)
        with nullcontext() if row.bug is None else plant(row.bug):
            return arguments[0](placement, config, *arguments[1:])


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes each case once, for tests that don't change it."""

    @cache
    def make(feature: str, family: str, steps: int = STEPS, layers: int = 2, options: Options = ()) -> Case:
        return FEATURES[feature](family, tmp_path_factory.mktemp(family), steps, layers, **dict(options))

    return make


def case_of(row: Row, cases: Any) -> Case:
    made: Case = cases(row.feature, row.family, row.steps, layers_of(row.layout), row.options)
    return made


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, cases: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return every rank's results of the file's selected rows."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    chosen = [each for item in items if hasattr(item, "callspec") for each in item.callspec.params.values()]
    directory, tasks = tmp_path_factory.mktemp("ranks"), {}
    for row in dict.fromkeys(each for each in chosen if isinstance(each, Row)):
        case = case_of(row, cases)
        config, *arguments = case.task(directory, layout_of(row.layout))
        tasks[row] = (config, row, type(case).run, *arguments)
    return run_by_size(_row_rank, directory, tasks)


def check(row: Row, cases: Any, results: Any) -> None:
    """Make all comparisons of the row's case."""
    case, found = case_of(row, cases), results[row]
    for comparison in case.checks:
        comparison(case, found)


def run_case(case: Case, layout: Settings, directory: Any, function: Any = None, **options: Any) -> list[RankResult]:
    """Run a case alone, on every rank of ``layout``."""
    return run_by_size(function or type(case).run, directory, {"": case.task(directory, layout, **options)})[""]
