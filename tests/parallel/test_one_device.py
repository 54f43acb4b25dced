"""The checks of ``tests/gpu/test_one_device.py`` on a CPU, in bfloat16 too: one rank after the other in one process."""

from pathlib import Path

import pytest

from tests.parallel.one_device import CHECKS, LAYERS, run_check
from tests.parallel.ranks import run_each


@pytest.mark.parametrize("checks", [CHECKS, pytest.param(LAYERS, marks=pytest.mark.acceptance)], ids=["all", "layers"])
def test_checks_of_one_device(checks: dict[str, object], tmp_path: Path) -> None:
    run_each(run_check, 1, tmp_path / "ranks", [(name, tmp_path) for name in checks])
