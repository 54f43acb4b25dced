"""An agent that is a program. It reads its task from one file and writes its result to another."""

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from slime_like.interfaces.agent import AgentResult, AgentTask
from slime_like.sandbox.serving import OwnFault, die_with_parent
from slime_like.system.processes import end_descendants

_CHUNK, _KEPT_LINES, _KEPT_CHARACTERS = 4096, 12, 800

PLACES = ("base_url", "key", "model", "prompt", "task_file", "result_file")
"""Names that a command may contain in braces."""

_PLACE = re.compile("{(" + "|".join(PLACES) + ")}")
_INHERITED = re.compile("PATH|LANG|LANGUAGE|LC_.*|TZ|TERM|TMPDIR|SSL_CERT_(FILE|DIR)|(?i:(https?|all|no)_proxy)")


class CommandFailed(OwnFault):
    """The program failed, or left no usable result."""


def filled(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Fill in the places of a command. Other braces stay, and so do places in the values."""
    return [_PLACE.sub(lambda found: values[found[1]], part) for part in command]


def run_command(
    command: Sequence[str], task: AgentTask, directory: Path, needs_result: bool, inherited: Sequence[str] = ()
) -> AgentResult:
    """Run the program and return its result. An exit code other than 0 is in the metadata, with the last output.

    ``directory`` is new, for the program's files, its working directory and its home directory. Without
    ``needs_result``, a missing result has reward 0. The program may run what a model wrote, so it inherits only
    environment variables that every program needs, and those that ``inherited`` names. Raises ``CommandFailed`` if it
    wrote no usable result, and ``OSError`` if it cannot be started, or a signal ended it before it wrote a result.
    """
    task_file, result_file = directory / "task.json", directory / "result.json"
    given = asdict(task)
    task_file.write_text(json.dumps(given), encoding="utf-8")
    values = given | {"task_file": str(task_file), "result_file": str(result_file)}
    if task.messages:
        values["prompt"] = str(task.messages[-1]["content"])
    kept = {name: value for name, value in os.environ.items() if name in inherited or _INHERITED.fullmatch(name)}
    code, output = _run(filled(command, values), task, directory, kept)
    if result_file.exists():
        result = _result(result_file)
    elif code < 0:
        raise ChildProcessError(f"signal {-code} ended it: {output}")
    elif needs_result:
        raise CommandFailed(f"exit code {code}: {output}" if code else "it wrote no result file")
    else:
        result = AgentResult(0.0)
    return replace(result, metadata={**result.metadata, "exit_code": code, "output": output}) if code else result


def _run(argv: list[str], task: AgentTask, directory: Path, inherited: dict[str, str]) -> tuple[int, str]:
    """Return the exit code and the end of the output, which is in this worker's log, its standard error."""
    parent, start = os.getpid(), os.lseek(2, 0, os.SEEK_END)
    for name in ("home", "work"):
        (directory / name).mkdir()
    variables = {  # where clients of the two protocols look for address and key
        "OPENAI_BASE_URL": f"{task.base_url}/v1",
        "OPENAI_API_KEY": task.key,
        "ANTHROPIC_BASE_URL": task.base_url,
        "ANTHROPIC_API_KEY": task.key,
        "HOME": str(directory / "home"),
        "PWD": str(directory / "work"),
    }
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=2,
            cwd=directory / "work",
            env=inherited | variables,
            preexec_fn=lambda: die_with_parent(parent),
        )
    except OSError as error:
        raise OSError(f"{argv[0]} cannot be started: {error}") from error
    try:
        code = process.wait()  # the pool bounds it
    finally:
        end_descendants()
    return code, _end(os.pread(2, _CHUNK, max(start, os.lseek(2, 0, os.SEEK_END) - _CHUNK)))


def _end(output: bytes) -> str:
    """Return the last lines. A program's reason may be above its last line."""
    lines = list(filter(None, map(str.strip, output.decode(errors="replace").splitlines())))
    return " | ".join(lines[-_KEPT_LINES:])[-_KEPT_CHARACTERS:] or "it wrote nothing"


def _result(path: Path) -> AgentResult:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}, not an object")
        return AgentResult(**content)
    except (TypeError, ValueError) as error:
        raise CommandFailed(f"its result file is unusable: {error}") from error
