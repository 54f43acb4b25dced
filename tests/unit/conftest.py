"""A unit test starts no process; with ``--unit-limit`` it fails when it takes longer."""

import multiprocessing.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")
_RUNNING: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--unit-limit", type=float, default=None, help="Seconds that a unit test may take.")


def _refuse_process(event: str, _: tuple[Any, ...]) -> None:
    if event in _STARTS and _RUNNING:
        raise AssertionError(f"{_RUNNING[0]} starts a process; it belongs into tests/process")


sys.addaudithook(_refuse_process)


@pytest.fixture(autouse=True)
def _no_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: object) -> int:
        raise AssertionError(f"{request.node.name} starts a process; it belongs into tests/process")

    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", refuse)  # which no audit event tells of
    _RUNNING.append(request.node.name)
    yield
    _RUNNING.clear()


def _seconds() -> float:
    """Monotonic seconds, without those in which this thread could run and had no processor."""
    waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return time.monotonic() - waited / 1e9


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    started, limit = _seconds(), item.config.getoption("--unit-limit")
    yield
    took = _seconds() - started
    if limit is not None and took > limit:
        pytest.fail(f"took {took:.2f} s, more than {limit:g} s; make it shorter, or move it to tests/process")
