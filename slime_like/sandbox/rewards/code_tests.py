"""Reward for Python code that passes tests, in a process that can only compute and print."""

import ast
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any

from slime_like.interfaces.user_code import RewardResult
from slime_like.sandbox import confined
from slime_like.sandbox.rewards.answers import after_thinking, last_block

_PYTHON = ("python", "py", "python3")
_OUTPUT_BYTES = 1 << 20
_DETAIL_CHARS = 300
_FEWEST_SECONDS = 0.01
_DEFINITIONS = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign)


@dataclass(frozen=True, slots=True)
class _Test:
    """Python that runs after a program, in its names, and must not raise; its input; and its output if that counts."""

    source: str = ""
    given: str = ""
    printed: str | None = None


def code_tests(
    prompt: str, response: str, answer: str, *, timeout_s: float = 4.0, memory_mb: int = 512, partial: bool = False
) -> RewardResult:
    """1 if the Python code of the response passes the tests in ``answer``, else 0.

    The code is the response's last fenced block of Python. ``answer`` is Python with ``assert``, a JSON list of such
    texts, or ``{"inputs": [...], "outputs": [...]}``: standard input and output of one run each. The code has no
    network or processes, and reads only Python's own files. It can deceive Python tests, but not outputs.

    Args:
        timeout_s: limit on all tests of a response; keep it below ``reward.timeout_s``.
        memory_mb: limit on the address space.
        partial: the reward is the share of tests that pass.

    Raises:
        ValueError: ``answer`` has no tests.
        OSError: the kernel cannot confine a process; it must be Linux 5.13 or newer.
    """
    tests = _tests(answer)
    code = last_block(after_thinking(response, prompt), _PYTHON)
    if code is None:
        return RewardResult(0.0, False, {"reason": "no code block"})
    try:
        compile(code, "response.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return RewardResult(0.0, False, {"reason": "no Python", "detail": _cut(str(error))})
    deadline, passed, first = time.monotonic() + timeout_s, 0, ""
    for test in tests:
        fault = _fault(code, test, deadline, memory_mb)
        passed += not fault
        first = first or fault
        if fault and not partial:
            break
    metadata: dict[str, Any] = {"passed": passed, "tests": len(tests), **({"reason": _cut(first)} if first else {})}
    succeeds = passed == len(tests)
    return RewardResult(passed / len(tests) if partial else float(succeeds), succeeds, metadata)


@lru_cache(maxsize=1024)
def _tests(answer: str) -> Sequence[_Test]:
    try:
        given = json.loads(answer)
    except ValueError:
        given = [answer]
    if isinstance(given, dict) and set(given) >= {"inputs", "outputs"}:
        if name := given.get("fn_name"):
            raise ValueError(f"tests that call a function (fn_name={name!r}) must be Python with assert")
        inputs, outputs = given["inputs"], given["outputs"]
        if not (_are_texts(inputs) and _are_texts(outputs) and len(inputs) == len(outputs)):
            raise ValueError("inputs and outputs of the tests must be lists of texts, equally many")
        return [_Test(given=one, printed=other) for one, other in zip(inputs, outputs, strict=True)]
    if not _are_texts(given) or not all(source.strip() for source in given):
        raise ValueError("the answer has no tests; give Python, a JSON list of it, or inputs and outputs")
    for source in given:
        try:
            tree = ast.parse(source)
            compile(tree, "tests.py", "exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"the tests are not Python: {error}") from error
        if all(isinstance(node, _DEFINITIONS) for node in tree.body):
            problem = f"the tests {source.strip()[:40]!r} contain only definitions, so every program passes"
            raise ValueError(f"{problem}; end them with asserts or calls, e.g. check(NAME)")
    return [_Test(source) for source in given]


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


def _fault(program: str, test: _Test, deadline: float, memory_mb: int) -> str:
    """Run the program in a confined process, which ends with this one. Return why it fails the test, or ""."""
    left = deadline - time.monotonic()
    if left < _FEWEST_SECONDS:
        return "timeout"
    word = secrets.token_hex(16)
    job = {
        "program": program,
        "tests": test.source,
        "word": word,
        "memory_bytes": memory_mb << 20,
        "cpu_s": int(left) + 1,
        "output_bytes": _OUTPUT_BYTES,
    }
    with ExitStack() as stack:
        given, printed, errors, message, verdict = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(5))
        _write(given, test.given)
        _write(message, json.dumps(job))
        descriptors = (message.fileno(), verdict.fileno())
        try:
            code = subprocess.run(
                [sys.executable, "-I", "-B", confined.__file__, *map(str, (os.getpid(), *descriptors))],
                stdin=given,
                stdout=printed,
                stderr=errors,
                pass_fds=descriptors,
                env={"LANG": "C.UTF-8"},
                cwd="/",
                timeout=left,
            ).returncode
        except subprocess.TimeoutExpired:
            return "timeout"
        last_error = _cut((_read(errors).strip().splitlines() or [""])[-1])
        if code == confined.CANNOT_CONFINE:
            raise OSError(f"the kernel cannot confine a process ({last_error}); use Linux 5.13 or newer")
        # A program may exit before its end, but not before tests that follow it.
        if code != 0 or (test.printed is None and _read(verdict) != word):
            return last_error or f"exit code {code} before the end of the tests"
        if test.printed is not None and _lines(_read(printed)) != _lines(test.printed):
            return "another output"
    return ""


def _write(file: IO[bytes], text: str) -> None:
    file.write(text.encode("utf-8", "surrogatepass"))
    file.flush()
    file.seek(0)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _cut(text: str) -> str:
    return text[:_DETAIL_CHARS]
