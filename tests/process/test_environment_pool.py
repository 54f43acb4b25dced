"""Worker processes of an environment: a step that fails."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_like.config.rollout import EnvironmentConfig
from slime_like.interfaces import Task
from slime_like.sandbox.environments.pool import EnvironmentPool, StepFailed

FAILING_MODULE = """
def found(word):
    return word != "raise"

class Echo:
    def reset(self, task): return {}
    def step(self, state, response):
        if not found(response):
            raise LookupError("no such thing")
"""


async def _step(word: str) -> None:
    pool = EnvironmentPool(EnvironmentConfig(name="failing_environment:Echo"))
    try:
        await pool.start()
        await pool.step(Task("", "", {}), None, word, first=True)
    finally:
        await pool.close()


@pytest.mark.parametrize(
    ("word", "reason"), [("raise", "error: LookupError: no such thing (FILE:9)"), ("x", "error: TypeError: step re")]
)
def test_a_step_that_fails_names_file_and_line(user_module: Callable[[str, str], Path], word: str, reason: str) -> None:
    file = user_module("failing_environment", FAILING_MODULE)
    with pytest.raises(StepFailed) as caught:
        asyncio.run(_step(word))
    assert str(caught.value).startswith(reason.replace("FILE", str(file)))
    assert f"({file}:" in str(caught.value)
