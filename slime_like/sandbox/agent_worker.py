"""One agent worker, started by the pool as ``python -m slime_like.sandbox.agent_worker PARENT_PID``.

The agent is a function, or a program that reads its task from one file and writes its result to another.
"""

import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import CodeType
from typing import Any

from slime_like.errors import ConfigError
from slime_like.interfaces.user_code import Agent, AgentResult, AgentTask
from slime_like.plugins.resolve import code_of, require_options, resolve_callable
from slime_like.sandbox.serving import Handler, OwnFault, adopt_orphans, die_with_parent, serve, untrusted
from slime_like.system.processes import end_descendants, process_ids, resident_bytes

_CHUNK, _KEPT_LINES, _KEPT_CHARACTERS = 4096, 12, 800
_MOST_ANSWER = 2**16
"""Bytes of a program's answer that are kept, from its end."""

PLACES = ("base_url", "key", "model", "prompt", "task_file", "result_file")
"""Names that a command may contain in braces."""

_PLACE = re.compile("{(" + "|".join(PLACES) + ")}")
_INHERITED = re.compile("PATH|LANG|LANGUAGE|LC_.*|TZ|TERM|TMPDIR|SSL_CERT_(FILE|DIR)|(?i:(https?|all|no)_proxy)")


def _prepare(setup: dict[str, Any]) -> tuple[Handler, dict[str, Any]]:
    command: list[str] = setup["command"]
    code: CodeType | None = None
    adopt_orphans()
    if setup["name"] is None:
        name = command[0]

        def run(task: AgentTask, directory: Path) -> AgentResult:
            answers = setup["answer"] == "stdout"
            return run_command(command, task, directory, setup["needs_result"], setup["environment"], answers)

    else:
        name, options = setup["name"], setup["options"]
        try:
            solve: Agent = resolve_callable("agent", name, {})
            if not inspect.iscoroutinefunction(solve):
                raise ValueError(f"agent {name!r} is not an `async def`; make it one")
            require_options(f"agent {name!r}", solve, options, ("task",))
        except ValueError as error:
            raise ConfigError([f"rollout.agent: {error}"]) from error
        code = code_of(solve)

        def run(task: AgentTask, directory: Path) -> AgentResult:
            return asyncio.run(solve(task, **options))

    of_module = process_ids()

    def handle(item: dict[str, Any]) -> dict[str, Any]:
        try:
            with untrusted(name, code):
                result = run(AgentTask(**item["task"]), Path(item["directory"]))
                if not isinstance(result, AgentResult):
                    raise TypeError(f"it returned a {type(result).__name__}; return an AgentResult")
                return {**asdict(result), "metadata": dict(result.metadata)}
        finally:
            end_descendants(keep=of_module)

    return handle, {}


class CommandFailed(OwnFault):
    """The program failed, or left no usable result."""


def run_command(
    command: Sequence[str],
    task: AgentTask,
    directory: Path,
    needs_result: bool,
    inherited: Sequence[str] = (),
    answers: bool = False,
) -> AgentResult:
    """Run the program and return its result. An exit code other than 0 is in the metadata, with the last output.

    ``directory`` is new, for the program's files, its working directory and its home directory. Without
    ``needs_result``, a missing result has reward 0. If it ``answers``, its standard output is the answer, unless its
    result file has one. The program may run what a model wrote, so it inherits only environment variables that every
    program needs, and those that ``inherited`` names. Raises ``CommandFailed`` if it wrote no usable result, and
    ``OSError`` if it cannot be started, or a signal ended it before it wrote a result.
    """
    task_file, result_file = directory / "task.json", directory / "result.json"
    given = asdict(task)
    task_file.write_text(json.dumps(given), encoding="utf-8")
    values = given | {"task_file": str(task_file), "result_file": str(result_file)}
    if task.messages:
        values["prompt"] = str(task.messages[-1]["content"])
    kept = {name: value for name, value in os.environ.items() if name in inherited or _INHERITED.fullmatch(name)}
    # Other braces stay, and so do places in the values.
    argv = [_PLACE.sub(lambda found: values[found[1]], part) for part in command]
    said = directory / "stdout" if answers else None
    code, output = _run(argv, task, directory, kept, said)
    if result_file.exists():
        try:
            content: Any = json.loads(result_file.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise TypeError(f"it holds a {type(content).__name__}, not an object")
            result = AgentResult(**content)
        except (TypeError, ValueError) as error:
            raise CommandFailed(f"its result file is unusable: {error}") from error
    elif code < 0:
        raise ChildProcessError(f"signal {-code} ended it: {output}")
    elif needs_result:
        raise CommandFailed(f"exit code {code}: {output}" if code else "it wrote no result file")
    else:
        result = AgentResult(0.0)
    if said is not None and result.answer is None:
        result = replace(result, answer=said.read_text(encoding="utf-8", errors="replace")[-_MOST_ANSWER:].strip())
    return replace(result, metadata={**result.metadata, "exit_code": code, "output": output}) if code else result


def _run(
    argv: list[str], task: AgentTask, directory: Path, inherited: dict[str, str], said: Path | None
) -> tuple[int, str]:
    """Return the exit code and the end of the output, which is in this worker's log, its standard error. The standard
    output goes to ``said`` first, if given."""
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
        output_file = 2 if said is None else os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output_file,
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
        if said is not None:
            os.close(output_file)
            with said.open("rb") as file:
                file.seek(max(0, said.stat().st_size - _MOST_ANSWER))
                os.write(2, file.read())
    output = os.pread(2, _CHUNK, max(start, os.lseek(2, 0, os.SEEK_END) - _CHUNK)).decode(errors="replace")
    lines = list(filter(None, map(str.strip, output.splitlines())))  # a reason may be above the last line
    return code, " | ".join(lines[-_KEPT_LINES:])[-_KEPT_CHARACTERS:] or "it wrote nothing"


if __name__ == "__main__":
    try:
        sys.exit(serve(_prepare, resident_bytes))
    finally:
        end_descendants()
