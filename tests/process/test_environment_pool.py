"""Worker processes of an environment: what their end costs."""

import asyncio
from pathlib import Path

import pytest

from slime_like.config.rollout import EnvironmentConfig
from slime_like.errors import EnvironmentFailure
from slime_like.interfaces import Task
from slime_like.sandbox.environments.pool import EnvironmentPool, StepFailed

USER_MODULE = """
import os, signal
from pathlib import Path
from slime_like.interfaces import Step

starts = Path(__file__).with_name("starts")
with starts.open("a") as file:
    file.write("x")
if starts.stat().st_size < 3 or starts.with_name("always").exists():
    os.kill(os.getpid(), signal.SIGKILL)

class Echo:
    def reset(self, task): return {}
    def step(self, state, response): return Step(state, response)
"""

FAILING_MODULE = """
def found(word):
    return word != "raise"

class Echo:
    def reset(self, task): return {}
    def step(self, state, response):
        if not found(response):
            raise LookupError("no such thing")
"""


async def _echoed(word: str, name: str = "killed_environment:Echo") -> str:
    pool = EnvironmentPool(EnvironmentConfig(name=name))
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


@pytest.mark.parametrize(
    ("word", "reason"), [("raise", "error: LookupError: no such thing (FILE:9)"), ("x", "error: TypeError: step re")]
)
def test_a_step_that_fails_names_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, reason: str
) -> None:
    file = tmp_path / "failing_environment.py"
    file.write_text(FAILING_MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(StepFailed) as caught:
        asyncio.run(_echoed(word, "failing_environment:Echo"))
    assert str(caught.value).startswith(reason.replace("FILE", str(file)))
    assert f"({file}:" in str(caught.value)
