"""Programs in separate processes; a user's modules, importable here and in workers."""

import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import clean_forks


def python(program: str, *arguments: str, **options: Any) -> str:
    """What the program writes, in a new interpreter; it must not fail."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, **options).stdout


def in_a_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a module returns in a process that has run no test, and has imported torch already."""
    context = clean_forks()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(theirs, function, arguments), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(120)
    found = ours.recv()
    process.join(30)
    return found


def _tell(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    connection.send(function(*arguments))


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Writes the module of this name and source."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(name: str, source: str) -> Path:
        file = tmp_path / f"{name}.py"
        file.write_text(source)
        return file

    return write
