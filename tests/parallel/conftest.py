"""Checkpoints and cases that many tests read without changing them."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.parity import Case, make_case
from tests.parallel.tiny import save_checkpoint


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes each family's case once."""

    @cache
    def make(family: str, layers: int = 4) -> Case:
        return make_case(family, tmp_path_factory.mktemp(family), layers=layers)

    return make
