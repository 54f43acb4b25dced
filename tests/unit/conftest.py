"""A unit test starts no process; with ``--unit-limit`` the run ends with a list of the tests that took longer."""

import multiprocessing.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")
_RUNNING: list[str] = []
_SLOW = "seconds over the limit"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--unit-limit", type=float, default=None, help="Report unit tests that take more seconds.")


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
        item.user_properties.append((_SLOW, took))  # which workers of xdist send along with the report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    tests = [report for report in reports if isinstance(report, pytest.TestReport) and report.when == "call"]
    slow = [(took, test.nodeid) for test in tests for name, took in test.user_properties if name == _SLOW]
    if slow:
        limit = config.getoption("--unit-limit")
        terminalreporter.section(f"over {limit:g} s; make them shorter, or move them to tests/process")
        for took, name in sorted(slow, reverse=True):
            terminalreporter.line(f"{took:.2f} s  {name}")
