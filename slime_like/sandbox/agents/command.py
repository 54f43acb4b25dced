"""An agent that is a program: its task in a file, its result in another."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slime_like.interfaces.agent import AgentResult, AgentTask
from slime_like.sandbox.serving import die_with_parent
from slime_like.system.processes import descendants

PLACES = ("base_url", "key", "task_file", "result_file")
"""What a command may hold in braces."""


class CommandFailed(Exception):
    """The program failed, or left no result."""


def filled(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The command with its places filled; other braces stay."""
    parts = list(command)
    for name in PLACES:
        parts = [part.replace(f"{{{name}}}", values[name]) for part in parts]
    return parts


def run_command(command: Sequence[str], task: AgentTask) -> AgentResult:
    """Run the program and read its result. Its working files are in a new directory, which is removed.

    Raises:
        CommandFailed: it cannot be started, its exit code is not 0, or it wrote no result.
    """
    with tempfile.TemporaryDirectory(prefix="agent-") as directory:
        files = {name: str(Path(directory) / f"{name}.json") for name in ("task_file", "result_file")}
        Path(files["task_file"]).write_text(json.dumps(asdict(task)), encoding="utf-8")
        log = Path(directory) / "log"
        code = _run(filled(command, {"base_url": task.base_url, "key": task.key, **files}), task, log)
        if code != 0:
            raise CommandFailed(f"exit code {code}: {_last_line(log)}")
        return _result(Path(files["result_file"]))


def _run(argv: list[str], task: AgentTask, log: Path) -> int:
    parent = os.getpid()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **_variables(task)},
                preexec_fn=lambda: die_with_parent(parent),
            )
        except OSError as error:
            raise CommandFailed(f"{argv[0]} cannot be started: {error}") from error
        try:
            return process.wait()  # the pool bounds it
        finally:
            _end_leftovers()


def _end_leftovers() -> None:
    """Kill what the program leaves running; ``adopt_orphans`` has made this process its parent."""
    while left := descendants(os.getpid()):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with suppress(ChildProcessError):  # another's child, which is this one's when that has ended
                os.waitpid(pid, 0)


def _variables(task: AgentTask) -> dict[str, str]:
    """Where clients of the two protocols look for address and key."""
    return {
        "OPENAI_BASE_URL": f"{task.base_url}/v1",
        "OPENAI_API_KEY": task.key,
        "ANTHROPIC_BASE_URL": task.base_url,
        "ANTHROPIC_API_KEY": task.key,
    }


def _last_line(log: Path) -> str:
    lines = log.read_bytes()[-2000:].decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"


def _result(path: Path) -> AgentResult:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        return AgentResult(**content)
    except FileNotFoundError as error:
        raise CommandFailed("it wrote no result file") from error
    except (TypeError, ValueError) as error:
        raise CommandFailed(f"its result file is unusable: {error}") from error
