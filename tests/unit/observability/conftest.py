"""Logger of a run directory, without TensorBoard."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from slime_like.config import LoggingConfig
from slime_like.observability.metrics import MetricLogger


@pytest.fixture
def logger(tmp_path: Path) -> Iterator[MetricLogger]:
    with closing(MetricLogger(LoggingConfig(tensorboard=False), tmp_path)) as logger:
        yield logger
