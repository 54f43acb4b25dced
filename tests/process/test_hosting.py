"""A process that serves an engine: errors, calls that are given up, and other interpreters."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from slime_like import errors
from slime_like.checks.check import check
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError, EngineError, SlimeLikeError, WeightSyncError
from slime_like.hosting.process import ChildProcess, ProcessEnded, portable
from slime_like.interfaces import GenerationRequest, PromptInput, SamplingParams
from tests.unit.checks.checkpoint import sound_flags

FIELDS = {
    "code": "damaged",
    "who": "engine 3",
    "phase": "update",
    "remedy": "send it again",
    "users_traceback": "line 1",
}

MODULE = f"""
import asyncio, os, sys
from multiprocessing.connection import Connection
from pathlib import Path
from slime_like.errors import ConfigError, EngineError, WeightSyncError
from slime_like.hosting.process import Owner

class Custom(EngineError): ...

class Host:
    aborted = []

    async def fail(self, kind):
        raise {{"sync": WeightSyncError, "custom": Custom}}[kind]("tensor w arrived damaged", **{FIELDS!r})

    async def configuration(self):
        raise ConfigError(["a=1: too small", "b=2: too large"])

    async def foreign(self):
        raise LookupError("no such\\n thing")

    async def generate(self, request):
        await asyncio.sleep(1000)

    async def abort(self, request_id):
        self.aborted.append(request_id)

    async def so_far(self):
        return self.aborted

    async def die(self):
        os._exit(3)

async def main():
    owner = Owner(Connection(int(sys.argv[1])), Path(sys.argv[2]))
    with owner.starting():
        pass
    await owner.serve(Host())

asyncio.run(main())
"""


Scenario = Callable[[ChildProcess], Awaitable[None]]
_CODE = "rollout.engine-installed"


@pytest.fixture
def play(user_module: Callable[[str, str], Path]) -> Callable[[Scenario], None]:
    """Run a scenario with a process that has not been started."""
    user_module("a_host", MODULE)

    async def bounded(scenario: Scenario) -> None:
        process = ChildProcess("a_host", lambda scratch: dict(os.environ))
        try:
            await asyncio.wait_for(scenario(process), 60)
        finally:
            process.end(5.0)
        assert not any(map(psutil.pid_exists, process.process_ids))

    return lambda scenario: asyncio.run(bounded(scenario))


def fields(error: SlimeLikeError) -> dict[str, str | None]:
    return {name: getattr(error, name) for name in FIELDS}


def test_errors_keep_class_and_fields(play: Callable[[Scenario], None]) -> None:
    async def scenario(process: ChildProcess) -> None:
        await process.start()
        with pytest.raises(WeightSyncError) as sync:
            await process.call("fail", "sync")
        assert fields(sync.value) == FIELDS
        assert str(sync.value) == "engine 3, update: tensor w arrived damaged; send it again"
        with pytest.raises(EngineError) as custom:  # this process may not have its class
            await process.call("fail", "custom")
        assert type(custom.value) is EngineError and fields(custom.value) == FIELDS
        for method, code, text in (
            ("configuration", "config", "a=1: too small\nb=2: too large"),
            ("foreign", "unexpected", "LookupError: no such thing"),
        ):
            with pytest.raises(EngineError) as other:
                await process.call(method)
            assert (other.value.code, str(other.value)) == (code, text)

    play(scenario)


def test_a_request_that_is_given_up_is_aborted_and_a_death_ends_every_call(play: Callable[[Scenario], None]) -> None:
    async def scenario(process: ChildProcess) -> None:
        await process.start()
        request = GenerationRequest("r7", PromptInput([1]), SamplingParams())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.generate(request), 0.1)
        assert await process.call("so_far") == ["r7"]
        waiting = asyncio.ensure_future(process.generate(request))
        for method in ("die", "so_far"):
            with pytest.raises(ProcessEnded):
                await process.call(method)
        with pytest.raises(ProcessEnded):
            await waiting
        assert not process.alive

    play(scenario)


@pytest.mark.parametrize(("python", "codes"), [("/none", [_CODE]), ("/bin/true", [_CODE]), (sys.executable, [])])
def test_an_interpreter_that_cannot_run_engines_is_rejected(tmp_path: Path, python: str, codes: list[str]) -> None:
    problems = check(load_config(None, [*sound_flags(tmp_path), "--rollout.python", python]))
    assert [problem.code for problem in problems] == codes


_KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SlimeLikeError)]


@pytest.mark.parametrize("kind", _KINDS)
def test_every_error_of_the_package_is_portable(kind: type[SlimeLikeError]) -> None:
    error = kind(["it fails"]) if kind is ConfigError else kind("it fails", **FIELDS)  # type: ignore[arg-type]
    carried = portable(error)
    assert type(carried) is (EngineError if kind is ConfigError else kind)
    assert fields(carried) == fields(error) and str(carried) == str(error)
