"""The checks of ``tests/gpu/test_one_device.py`` on a CPU, in bfloat16 too: one rank after the other in one process."""

from pathlib import Path

import pytest

from tests.parallel.one_device import CHECKS, LAYERS, run_check
from tests.parallel.ranks import run_each

SOME = [name for number, name in enumerate(CHECKS) if number % 4 in (0, 3)]
"""Each check with one of the backends, in turn."""
OTHERS = [name for name in (*CHECKS, *LAYERS) if name not in SOME]


@pytest.mark.parametrize("names", [SOME, pytest.param(OTHERS, marks=pytest.mark.acceptance)], ids=["some", "others"])
def test_checks_of_one_device(names: list[str], tmp_path: Path) -> None:
    run_each(run_check, 1, tmp_path / "ranks", [(name, tmp_path) for name in names])
