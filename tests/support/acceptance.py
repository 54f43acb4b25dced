"""Parameters of tests, of which ``benchmarks/acceptance.sh`` runs some and the suite the others."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def some_in_acceptance(cases: Iterable[Any], is_later: Callable[[Any], bool]) -> list[Any]:
    """Return each case as a parameter, or a tuple as several, marked ``acceptance`` if it ``is_later``."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.acceptance] * is_later(case))
        for case in cases
    ]
