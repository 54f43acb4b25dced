"""A Ray that does not start is one sentence, and an interrupt that it swallowed is none."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from slime_like.config import ClusterConfig
from slime_like.errors import SlimeLikeError
from slime_like.interrupts import InterruptHandler
from slime_like.orchestration import guard
from slime_like.orchestration.cluster import Cluster


@pytest.fixture
def handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[InterruptHandler]:
    """Nothing is started, so that there is nothing to guard; signals as in the command."""
    monkeypatch.setattr(guard, "start", lambda *_: subprocess.Popen(["cat"], stdin=subprocess.PIPE))
    before = signal.getsignal(signal.SIGINT)
    handler = InterruptHandler()
    signal.signal(signal.SIGINT, handler)
    yield handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("interrupted", [False, True])
def test_ray_that_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: InterruptHandler, interrupted: bool
) -> None:
    def init(**_: Any) -> None:
        handler.noted = interrupted
        raise Exception("The current node timed out during startup")  # the class that Ray raises then

    monkeypatch.setattr(ray, "init", init)
    kind, message = (
        (KeyboardInterrupt, "")
        if interrupted
        else (SlimeLikeError, r"cluster: Ray did not start \(on this machine\): The current node timed out")
    )
    with pytest.raises(kind, match=message), Cluster(ClusterConfig(), tmp_path / "logs", 1):
        pass
