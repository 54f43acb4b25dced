"""Worker processes of an environment: what their end costs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slime_like.config.rollout import EnvironmentConfig
from slime_like.environments import Task
from slime_like.environments.pool import EnvironmentPool
from slime_like.errors import EnvironmentFailure

USER_MODULE = """
import os, signal
from pathlib import Path
from slime_like.environments import Step

starts = Path(__file__).with_name("starts")
with starts.open("a") as file:
    file.write("x")
if starts.stat().st_size < 3 or starts.with_name("always").exists():
    os.kill(os.getpid(), signal.SIGKILL)

class Echo:
    def reset(self, task): return {}
    def step(self, state, response): return Step(state, response)
"""


async def _echoed(word: str) -> str:
    pool = EnvironmentPool(EnvironmentConfig(name="killed_environment:Echo"))
    try:
        await pool.start()
        return (await pool.step(Task("", "", {}), None, word, first=True)).observation
    finally:
        await pool.close()


def test_a_worker_that_is_killed_while_starting_is_started_again_within_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "killed_environment.py").write_text(USER_MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert asyncio.run(_echoed("hello")) == "hello"
    (tmp_path / "always").touch()
    with pytest.raises(EnvironmentFailure, match="ended while starting: it was killed"):
        asyncio.run(_echoed("hello"))
    assert (tmp_path / "starts").stat().st_size == 3 + 3
