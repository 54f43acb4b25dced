"""The worker's side: reads items from standard input, writes one answer per item to standard output.

Imports neither torch nor the configuration, so that a replacement is quick. A worker ends when its input ends, and the
kernel ends it when its parent dies.
"""

import ctypes
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from types import CodeType
from typing import Any, BinaryIO

from slime_like.errors import ConfigError
from slime_like.plugins.traceback import full_traceback, place
from slime_like.sandbox.protocol import decode, encode

Handler = Callable[[dict[str, Any]], dict[str, Any]]
"""One item to one answer. What the item's code raises, it raises inside ``untrusted``."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST = 300
_LONGEST_TRACEBACK = 10_000


class ItemFailed(Exception):
    """An item without a result; ``answer`` has the reason."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer


def serve(prepare: Callable[[dict[str, Any]], tuple[Handler, dict[str, Any]]]) -> int:
    """Serve until standard input ends; the parent's process id is the first argument of the command line.

    Args:
        prepare: makes the handler from the first message, and what the parent receives besides "ready". That message
            has ``memory_mb``, the address space allowed beyond what is in use when ``prepare`` has returned, and
            ``timeout_s``, the CPU seconds that one item may take.

    Returns:
        Exit code: 0, or 1 where ``prepare`` raised ``ConfigError``, whose problems the parent receives.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the pool decides what follows
    die_with_parent(int(sys.argv[1]))
    requests, replies = _take_over_pipes()
    setup = decode(requests.readline())
    if setup is None:
        return 0
    try:
        handle, about = prepare(setup)
    except ConfigError as error:
        _send(replies, {"problems": list(map(str, error.problems))})
        return 1
    _limit_memory(int(setup["memory_mb"]) * 2**20)
    _send(replies, {"ready": os.getpid(), **about})
    while (request := decode(requests.readline())) is not None:
        for item in request["items"]:
            _limit_cpu(setup["timeout_s"])
            try:
                answer = handle(item)
            except ItemFailed as failed:
                answer = failed.answer
            _send(replies, answer)
    return 0


@contextmanager
def untrusted(name: str, code: CodeType | None) -> Iterator[None]:
    """Inside, an item's code runs; what it raises becomes ``ItemFailed``.

    Args:
        name: what the user calls it.
        code: of a custom function or method: the detail names the line of its file.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ItemFailed({**_reason(error, code), "function": name}) from error


def _reason(error: BaseException, code: CodeType | None) -> dict[str, Any]:
    if isinstance(error, MemoryError):
        return {"reason": "memory"}
    where_raised = "" if code is None else f" ({place(error, code)})"
    if isinstance(error, TimeoutError):  # of something that the item's code has waited for
        return {"reason": "timeout", "detail": f"{str(error)[:_LONGEST]}{where_raised}"}
    detail = f"{type(error).__name__}: {error}"[:_LONGEST] + where_raised
    return {"reason": "error", "detail": detail, "traceback": full_traceback(error)[-_LONGEST_TRACEBACK:]}


def _send(stream: BinaryIO, message: dict[str, Any]) -> None:
    try:
        data = encode(message)
    except (TypeError, ValueError) as error:  # what JSON cannot express
        data = encode({"reason": "error", "detail": f"{_unsendable(message)}: {error}"[:_LONGEST]})
    stream.write(data)
    stream.flush()


def _unsendable(message: Mapping[str, Any]) -> str:
    """The first part that JSON cannot express."""
    for name, part in message.items():
        try:
            encode({name: part})
        except (TypeError, ValueError):
            return name
    return "the answer"


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep the two pipes for the pool; what an item's code prints goes to standard error."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what is printed before a kill is kept
    return requests, replies


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        sys.exit(0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parents end, so that all of them can be found."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _limit_memory(extra_bytes: int) -> None:
    """Bound the address space to what is in use now plus ``extra_bytes``."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_cpu(seconds: float) -> None:
    """``seconds`` more of CPU time, over all threads, rounded up; then the kernel ends this process.

    One thread meets the pool's bound on time first. This one is for those that start more, and its children inherit
    it.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    wanted = math.ceil(time.process_time() + seconds) + 1
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
