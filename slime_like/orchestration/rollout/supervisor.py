"""Engine supervision: deaths, the restart budget, and the preparation of replacements.

A failed call reveals a death (``EngineClient``, ``WeightSync``, turns on shared devices); there is no heartbeat. The
engine's requests are queued again. It is replaced at the next weight sync, or immediately if no engine serves
(``revive``). Without a restart left, the error ends the run.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slime_like.config.rollout import RolloutConfig
from slime_like.errors import EngineError
from slime_like.observability.waiting import ignore_answers
from slime_like.orchestration.rollout.engine_group import EngineGroup


class NoEngineLeft(EngineError):
    """The pool's last engine died. Requests wait until an engine joins."""

    code = "no-engine"


@dataclass(eq=False, slots=True)
class EngineStart:
    """One start of one engine.

    Attributes:
        serves: whether it has the current weights.
        death: the error that revealed its end.
        tokens, requests: what it has to answer.
    """

    index: int
    name: str
    actor: Any
    serves: bool = False
    death: EngineError | None = None
    tokens: int = 0
    requests: int = 0


class EngineSupervisor:
    """Router of requests to living engines that replaces dead ones. Thread-safe, but only one thread replaces.

    A dead engine is taken out of service as soon as its death is detected. ``replace_dead`` starts it again, within the
    restart budget, and ``admit`` lets it serve once it has the current weights. Without ``replace_and_sync``, engines
    serve the weights that they load at their start.

    Args:
        note: called with a sentence about every replaced engine.

    Attributes:
        generation: number of replacements so far. A transport connected at an earlier generation lacks the latest
            engines.
        replace_and_sync: replaces dead engines and makes all serve the current weights; set by ``WeightSync``.
    """

    def __init__(self, engines: EngineGroup, rollout: RolloutConfig, note: Callable[[str], None]) -> None:
        self.engines = engines
        self.generation = 0
        self.replace_and_sync: Callable[[], object] | None = None
        self._max_restarts = rollout.max_engine_restarts
        self._note = note
        self._lock = threading.Lock()
        self._starts: list[EngineStart] = []  # by engine
        self._capacity = rollout.max_concurrent_requests

    def start(self, left: Callable[[Sequence[str]], None] = ignore_answers) -> None:
        """Wait until every engine has loaded the model, then let all serve.

        Args:
            left: called with the engines that are not ready yet.
        """
        self.engines.start(left)
        self._starts = [self._started(index) for index in range(len(self.engines))]
        self.admit()

    def _started(self, index: int) -> EngineStart:
        return EngineStart(index, self.engines.name(index), self.engines.actor(index))

    # ----------------------------------------------------------------------------------------------------- requests
    @property
    def serving(self) -> list[EngineStart]:
        """Living engines with the current weights."""
        return [start for start in self._starts if start.serves]

    def acquire(self, tokens: int) -> EngineStart | None:
        """Charge ``tokens`` to the least loaded engine with room, and return it; ``None`` if all are full.

        Raises:
            NoEngineLeft: no engine serves.
        """
        with self._lock:
            if not (serving := self.serving):
                raise NoEngineLeft(str(next((each.death for each in self._dead), "no engine has been started")))
            free = [start for start in serving if start.requests < self._capacity]
            chosen = min(free, key=lambda start: start.tokens, default=None)
            if chosen is not None:
                chosen.tokens, chosen.requests = chosen.tokens + tokens, chosen.requests + 1
            return chosen

    def release(self, start: EngineStart, tokens: int) -> None:
        """Record that a request of ``tokens`` ended."""
        with self._lock:
            start.tokens, start.requests = start.tokens - tokens, start.requests - 1

    # ------------------------------------------------------------------------------------------------------- deaths
    @property
    def has_dead(self) -> bool:
        """True if a dead engine has not been replaced."""
        return bool(self._dead)

    @property
    def _dead(self) -> list[EngineStart]:
        return [start for start in self._starts if start.death is not None]

    def lose(self, start: EngineStart, error: EngineError) -> bool:
        """Check after a failed call whether the engine is alive, and record its death if not.

        Returns:
            True if it is dead and may be replaced. If no restart is left, ``error`` must end the run.
        """
        self._bury([start], error)
        return start.death is not None

    def find_dead(self, error: Exception) -> bool:
        """Check all engines like ``lose``. Return True if some are dead and all of them may be replaced."""
        self._bury(self._starts, EngineError(str(error), code="engine-died"))
        return self.has_dead

    def _bury(self, starts: Sequence[EngineStart], error: EngineError) -> None:
        """Record which of these engines are dead, if all dead ones may be replaced."""
        if self._restarts_left < 1:
            return
        dead = [start for start in starts if start.death is None and not self.engines.is_alive(start.actor)]
        with self._lock:
            dead = [start for start in dead if start.death is None]  # another thread may have been faster
            if len(dead) > self._restarts_left:
                return
            for start in dead:
                start.death, start.serves = error, False

    @property
    def _restarts_left(self) -> int:
        return self._max_restarts - self.generation - len(self._dead)

    # -------------------------------------------------------------------------------------------------- replacement
    def replace_dead(self) -> None:
        """Start dead engines again. They serve nothing until ``admit``, since they need the current weights first.

        Raises:
            EngineError: an engine did not start.
        """
        dead = self._dead
        self.engines.restart_engines([start.index for start in dead])
        with self._lock:
            self.generation += len(dead)
            for start in dead:
                self._starts[start.index] = self._started(start.index)
        for start in dead:
            self._note(f"{start.name} was restarted ({start.death})")

    def admit(self) -> None:
        """Let all living engines serve. They must have the current weights."""
        with self._lock:
            for start in self._starts:
                start.serves = start.death is None

    def revive(self) -> None:
        """Restart engines if none serves, after the last one died. Call where weights can be sent.

        Raises:
            EngineError: an engine did not start, or no restart is left.
        """
        if self.serving:
            return
        if not self.has_dead:
            raise EngineError("no engine has been started", code="no-engine")
        if self.replace_and_sync is not None:
            self.replace_and_sync()
        else:
            self.replace_dead()
            self.admit()

    # ------------------------------------------------------------------------------------------------ device memory
    def sleep(self, keep_weights: bool) -> None:
        """Make living engines release device memory. Parts that are already asleep stay asleep."""
        self._call_living("sleep", keep_weights, phase="making room for the trainers")

    def wake(self, parts: Sequence[Literal["weights", "kv_cache"]]) -> None:
        """Make living engines reclaim these parts of the device memory."""
        self._call_living("wake", parts, phase="coming back to the device")

    def _call_living(self, method: str, *arguments: Any, phase: str) -> None:
        """Call every engine that is not known to be dead, and record deaths that this reveals.

        Raises:
            EngineError: a living engine failed, or a dead one may not be replaced.
        """
        living = [start for start in self._starts if start.death is None]
        asked = [self.engines.ask(method, *arguments, phase=phase, indexes=[start.index]) for start in living]
        for start, answers in zip(living, asked, strict=True):
            try:
                answers.result()
            except EngineError as error:
                if not self.lose(start, error):
                    raise
