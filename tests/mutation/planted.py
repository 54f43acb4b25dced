"""Run ranks with a bug put into them, and require that the comparison named for it notices: a crash is no proof.

A bug is put in by replacing functions in the forked ranks, and taken out before the next bug's turn in the same fork.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slime_like.interfaces import RankPlacement
from tests.parallel.ranks import run_by_size

Patch = pytest.MonkeyPatch
Bug = Callable[[Patch], None]
Comparison = Callable[..., None]


def no_bug(patch: Patch) -> None:
    """If its comparisons failed, a broken harness would look like a caught bug."""


def run_planted(
    function: Callable[..., Any], directory: Path, tasks: dict[Any, tuple[Bug, tuple[Any, ...]]]
) -> dict[Any, list[Any]]:
    """Run the rank function with each task's bug and arguments, and return every rank's results by the tasks' names."""
    given = {name: (task[0], bug, function, task[1:]) for name, (bug, task) in tasks.items()}
    return run_by_size(_planted, directory, given)


def _planted(
    placement: RankPlacement, config: Any, bug: Bug, function: Callable[..., Any], rest: tuple[Any, ...]
) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        return function(placement, config, *rest)


def require_caught(comparisons: Sequence[Comparison], caught_by: Comparison | None, *arguments: Any) -> None:
    """Require that the comparisons before ``caught_by`` succeed and that it fails; if ``None``, that all succeed."""
    for comparison in comparisons:
        if comparison is caught_by:
            with pytest.raises(AssertionError):
                comparison(*arguments)
            return
        comparison(*arguments)
    assert caught_by is None
