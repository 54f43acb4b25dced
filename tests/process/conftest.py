"""A user's modules, found by this process and by the worker processes that it starts."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Writes the module of this name and source."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(name: str, source: str) -> Path:
        file = tmp_path / f"{name}.py"
        file.write_text(source)
        return file

    return write
