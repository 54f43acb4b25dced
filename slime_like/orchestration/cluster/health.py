"""Liveness checks of actors while other work is waited for."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import ray

from slime_like.errors import SlimeLikeError
from slime_like.orchestration.cluster.ray_calls import one

_EVERY_S = 2.0
_ANSWER_S = 10.0
"""For an answer that is there."""


class Liveness:
    """Repeated check of actors that never waits for an answer: a busy actor answers later.

    Args:
        actors: Ray actors that run one call after the other.
    """

    def __init__(self, actors: Sequence[Any], names: Sequence[str], phase: str, error: type[SlimeLikeError]) -> None:
        self._actors = dict(zip(names, actors, strict=True))
        self._phase = phase
        self._error = error
        self._asked: dict[Any, str] = {}
        self._next = 0.0
        self._lock = threading.Lock()

    def check(self) -> None:
        """Read the answers to the last check, and ask again; at most every other second. From any thread.

        Raises:
            error: an actor has died.
        """
        with self._lock:
            if time.monotonic() < self._next:
                return
            self._next = time.monotonic() + _EVERY_S
            self._settle()
            for name in self._actors.keys() - set(self._asked.values()):
                self._asked[self._actors[name].__ray_ready__.remote()] = name

    def _settle(self) -> None:
        if not self._asked:
            return
        answered, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        for reference in answered:
            name = self._asked.pop(reference)
            one(reference, name, phase=self._phase, timeout_s=_ANSWER_S, error=self._error)
