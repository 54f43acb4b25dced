"""One reward worker process: reads items from standard input, writes one outcome per item to standard output.

Started by the pool as ``python -m slime_like.rewards.worker PARENT_PID``. Imports neither torch nor the configuration,
so that a replacement is quick. It ends when its input ends, and the kernel ends it when its parent dies.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

from slime_like.rewards.protocol import encode, read_message
from slime_like.rewards.registry import LOCAL, RewardCallable, check_options, resolve_reward
from slime_like.rewards.result import RewardResult

_PR_SET_PDEATHSIG = 1
_WARM_UP = {"prompt": "", "response": "\\boxed{1}", "answer": "1"}


def main() -> int:
    """Serve until standard input ends. Exit code 0 then, 1 where a reward function cannot be used."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the pool decides what follows
    _die_with_parent(int(sys.argv[1]))
    requests, replies = _take_over_pipes()
    setup = read_message(requests)
    if setup is None:
        return 0
    try:
        functions = [_Function(**function) for function in setup["functions"]]
    except ValueError as error:
        _send(replies, {"error": str(error)})
        return 1
    for function in functions:
        function.warm_up()
    _limit_memory(int(setup["memory_mb"]) * 2**20)
    _send(replies, {"ready": os.getpid()})
    while (request := read_message(requests)) is not None:
        for item in request["items"]:
            _send(replies, _outcome(functions, item))
    return 0


class _Function:
    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name = name
        self._options = options
        self._call: RewardCallable = resolve_reward(name)
        check_options(name, self._call, options)

    def __call__(self, item: dict[str, str]) -> RewardResult:
        result = self._call(item["prompt"], item["response"], item["answer"], **self._options)
        if not isinstance(result, RewardResult):
            raise TypeError(f"it returned a {type(result).__name__}; return a RewardResult")
        if not math.isfinite(result.reward):
            raise ValueError(f"its reward is {result.reward}; return a finite number")
        return result

    def warm_up(self) -> None:
        """Compile what a first call compiles, outside any sample's time; not users' functions, nor a service."""
        if self.name in LOCAL:
            self(_WARM_UP)


def _outcome(functions: list[_Function], item: dict[str, str]) -> dict[str, Any]:
    """Rewards of all functions, or the reason why this one sample has none."""
    results: list[RewardResult] = []
    for function in functions:
        try:
            results.append(function(item))
        except MemoryError:
            return {"reason": "memory", "function": function.name}
        except Exception as error:
            return {"reason": "error", "function": function.name, "detail": f"{type(error).__name__}: {error}"[:300]}
    return {
        "rewards": [float(result.reward) for result in results],
        "successes": [float(result.success) for result in results],
        "metadata": {f.name: r.metadata for f, r in zip(functions, results, strict=True) if r.metadata},
    }


def _send(stream: BinaryIO, message: dict[str, Any]) -> None:
    try:
        data = encode(message)
    except (TypeError, ValueError) as error:  # metadata that JSON cannot express
        data = encode({"reason": "error", "detail": f"metadata: {error}"[:300]})
    stream.write(data)
    stream.flush()


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep the two pipes for the pool; what a reward function prints goes to standard error."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, replies


def _die_with_parent(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the call above
        os._exit(0)


def _limit_memory(extra_bytes: int) -> None:
    """Bound the address space to what is in use now plus ``extra_bytes``."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    sys.exit(main())
