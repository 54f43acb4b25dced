"""Checkpoints and cases that many tests read without changing them."""

from pathlib import Path

import pytest

from tests.parallel.harness import cases as cases
from tests.parallel.harness import results as results
from tests.parallel.tiny import save_checkpoint


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))
