"""An agent that is a program. It reads its task from one file and writes its result to another."""

import json
import os
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any

from slime_like.interfaces.agent import AgentResult, AgentTask
from slime_like.sandbox.serving import die_with_parent
from slime_like.system.processes import descendants

_CHUNK, _KEPT_CHUNKS = 4096, 2

PLACES = ("base_url", "key", "task_file", "result_file")
"""Names that a command may contain in braces."""


class CommandFailed(Exception):
    """The program failed, or left no result."""


def filled(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Fill in the places of a command. Other braces stay."""
    parts = list(command)
    for name in PLACES:
        parts = [part.replace(f"{{{name}}}", values[name]) for part in parts]
    return parts


def run_command(command: Sequence[str], task: AgentTask) -> AgentResult:
    """Run the program and read its result. Its files are in a new directory, which is removed.

    Raises:
        CommandFailed: it cannot be started, its exit code is not 0, or it wrote no result.
    """
    with tempfile.TemporaryDirectory(prefix="agent-") as directory:
        files = {name: str(Path(directory) / f"{name}.json") for name in ("task_file", "result_file")}
        Path(files["task_file"]).write_text(json.dumps(asdict(task)), encoding="utf-8")
        code, last = _run(filled(command, {"base_url": task.base_url, "key": task.key, **files}), task)
        if code != 0:
            raise CommandFailed(f"exit code {code}: {last}")
        return _result(Path(files["result_file"]))


def _run(argv: list[str], task: AgentTask) -> tuple[int, str]:
    """Return the exit code and the last line of output. All output is copied to this worker's log."""
    parent = os.getpid()
    variables = {  # where clients of the two protocols look for address and key
        "OPENAI_BASE_URL": f"{task.base_url}/v1",
        "OPENAI_API_KEY": task.key,
        "ANTHROPIC_BASE_URL": task.base_url,
        "ANTHROPIC_API_KEY": task.key,
    }
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            preexec_fn=lambda: die_with_parent(parent),
        )
    except OSError as error:
        raise CommandFailed(f"{argv[0]} cannot be started: {error}") from error
    last: deque[bytes] = deque(maxlen=_KEPT_CHUNKS)
    assert process.stdout is not None
    with process.stdout as output:
        passing = Thread(target=_pass_on, args=(output.fileno(), last), daemon=True)
        passing.start()
        try:
            code = process.wait()  # the pool bounds it
        finally:
            _end_leftovers()
        passing.join()  # no process has the pipe any more
    lines = b"".join(last).decode(errors="replace").strip().splitlines()
    return code, lines[-1] if lines else "it wrote nothing"


def _pass_on(pipe: int, last: deque[bytes]) -> None:
    """Copy the pipe to standard error, which is this worker's log."""
    while chunk := os.read(pipe, _CHUNK):
        last.append(chunk)
        os.write(2, chunk)


def _end_leftovers() -> None:
    """Kill what the program left running. ``adopt_orphans`` has made this process its parent."""
    while left := descendants(os.getpid()):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with suppress(ChildProcessError):  # a grandchild; this process adopts it when its parent has ended
                os.waitpid(pid, 0)


def _result(path: Path) -> AgentResult:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}, not an object")
        return AgentResult(**content)
    except FileNotFoundError as error:
        raise CommandFailed("it wrote no result file") from error
    except (TypeError, ValueError) as error:
        raise CommandFailed(f"its result file is unusable: {error}") from error
