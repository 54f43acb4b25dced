"""The worker's side of a pool: reads items from standard input and writes one answer per item to standard output.

Messages are lines of JSON; nothing is ever unpickled. This module imports neither torch nor the configuration, so a
replaced worker starts quickly. A worker ends when its input ends, and the kernel ends it when its parent dies.
"""

import ctypes
import json
import math
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from threading import Thread
from types import CodeType
from typing import Any, BinaryIO

from slime_like.errors import ConfigError
from slime_like.plugins.resolve import place_in_code

Handler = Callable[[dict[str, Any]], dict[str, Any]]
"""Function from an item to its answer. It runs the item's code inside ``untrusted``."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST = 1000
_LONGEST_TRACEBACK = 10_000
_WATCH_S = 0.5
_pool: list[BinaryIO] = []
"""The pipe to the pool, while this process serves."""
_running: dict[str, str] = {}
"""Code that the pool knows to be running, as ``untrusted`` reported it."""


def encode(message: dict[str, Any]) -> bytes:
    """Encode a message as one line of ASCII. Raises ``TypeError`` or ``ValueError`` if JSON cannot express it."""
    return json.dumps(message, allow_nan=False).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """Decode a line. Returns ``None`` if it is cut off, because the other side has ended."""
    return json.loads(line) if line.endswith(b"\n") else None


class ItemFailed(Exception):
    """An item without a result. ``answer`` has the reason, and ``fault`` if the item itself is to blame."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer


class OwnFault(Exception):
    """A failure that counts as an answer: what the model did is to blame, and no machinery."""


def serve(
    prepare: Callable[[dict[str, Any]], tuple[Handler, dict[str, Any]]], used_bytes: Callable[[], int] | None = None
) -> int:
    """Serve until standard input ends. The first command-line argument is the parent's process id.

    Args:
        prepare: builds the handler from the first message, and the values that the parent receives with "ready". That
            message has ``memory_mb``, the memory allowed in addition to what is in use after ``prepare``, and
            ``timeout_s``, the CPU seconds allowed per item.
        used_bytes: measures the memory in use. By default, the kernel bounds this process's address space.

    Returns the exit code: 0, or 1 if ``prepare`` raised ``ConfigError``. The parent receives its problems.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the pool decides what to do
    die_with_parent(int(sys.argv[1]))
    requests, replies = _take_over_pipes()
    _pool.append(replies)
    setup = decode(requests.readline())
    if setup is None:
        return 0
    try:
        handle, about = prepare(setup)
    except ConfigError as error:
        _send(replies, {"problems": list(map(str, error.problems))})
        return 1
    extra_bytes = int(setup["memory_mb"]) * 2**20
    if used_bytes is None:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra_bytes,) * 2)
    else:
        Thread(target=_watch_memory, args=(replies, used_bytes, used_bytes() + extra_bytes), daemon=True).start()
    _send(replies, {"ready": os.getpid(), **about})
    while (item := decode(requests.readline())) is not None:
        _limit_cpu(setup["timeout_s"])
        try:
            answer = handle(item)
        except ItemFailed as failed:
            answer = failed.answer
        _send(replies, answer)
    return 0


@contextmanager
def untrusted(name: str, code: CodeType | None, fault: str | None = None) -> Iterator[None]:
    """Turn what an item's code raises inside into ``ItemFailed``. The pool learns what runs, in case it never returns.

    Args:
        name: what the user calls the code.
        code: code of a custom function or method; the detail names the line in its file.
        fault: part of the item that is to blame if this code has no result; ``None`` if the code is, or its machine.
    """
    about = {"function": name} | ({} if fault is None else {"fault": fault})
    if _pool and about != _running:
        _running.clear()
        _running.update(about)
        _send(_pool[0], {"running": about})
    try:
        yield
    except (Exception, SystemExit) as error:
        own = {"fault": "program"} if isinstance(error, OwnFault) else {}
        raise ItemFailed({**_reason(error, code), **about, **own}) from error


def _reason(error: BaseException, code: CodeType | None) -> dict[str, Any]:
    if isinstance(error, MemoryError):
        return {"reason": "memory"}
    where_raised = "" if code is None else f" ({place_in_code(error, code)})"
    if isinstance(error, TimeoutError):  # the item's code waited for something too long
        return {"reason": "timeout", "detail": f"{str(error)[:_LONGEST]}{where_raised}"}
    detail = f"{type(error).__name__}: {error}"[:_LONGEST] + where_raised
    trace = "".join(traceback.format_exception(error))
    return {"reason": "error", "detail": detail, "traceback": trace[-_LONGEST_TRACEBACK:]}


def _send(stream: BinaryIO, message: dict[str, Any]) -> None:
    try:
        data = encode(message)
    except (TypeError, ValueError) as error:
        data = encode({"reason": "error", "detail": f"the answer cannot be written as JSON: {error}"[:_LONGEST]})
    stream.write(data)
    stream.flush()


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep the two pipes for the pool, and redirect the output of items' code to standard error."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # keeps what was printed before a kill
    return requests, replies


def die_with_parent(parent: int, by: int = signal.SIGKILL) -> None:
    """Make the kernel send this process the signal ``by`` when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it died before the call above
        sys.exit(0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parents end, so all of them can be found."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _watch_memory(replies: BinaryIO, used_bytes: Callable[[], int], most: int) -> None:
    """Ask the pool to end this process and its descendants once they use more than ``most`` bytes."""
    while used_bytes() <= most:
        time.sleep(_WATCH_S)
    _send(replies, {"ended": "memory"})


def _limit_cpu(seconds: float) -> None:
    """Allow ``seconds`` more of CPU time over all threads, rounded up. The kernel then ends this process.

    A single thread meets the pool's time limit first. This limit is for code that starts more threads, and its children
    inherit it.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    wanted = math.ceil(time.process_time() + seconds) + 1
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
