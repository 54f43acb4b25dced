"""Bounded Ray calls. Failures read as one sentence: who, where, in which phase."""

import copy
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from slime_like.errors import LIKELY_KILLER, ConfigError, SlimeLikeError
from slime_like.observability.timing import ignore_answers
from slime_like.orchestration.cluster.lean_node import own_node
from slime_like.system.interrupts import raise_if_interrupted

_READY_TIMEOUT_S = 60.0
"""Bound for fetching a value that is already there."""

_LOOK_EVERY_S = 5.0
"""Time between checks for an interrupt."""

_ASK_EVERY_S = 2.0

_ROLE = re.compile(r"(\w+) (?:worker |rank )?(\d+).*")
"""Pattern of an actor's name in messages. After a restart, its log has a number ("engine-0.2.log")."""

_Answer = TypeVar("_Answer")
_Error = TypeVar("_Error", bound=SlimeLikeError)
_P = ParamSpec("_P")


def watch_none() -> None:
    """Don't check other workers while waiting."""


@dataclass(frozen=True, slots=True)
class Answers(Generic[_Answer]):
    """Answers of several actors to one call.

    Attributes:
        references: Ray's references to the answers, by the actor's name ("trainer rank 3"), in order.
        phase: what the actors are doing, for messages ("scoring").
        timeout_s: default bound of a whole wait, in seconds.
        watch: called every few seconds of waiting; raises if an answer needs a dead worker.
        before: called with the bound before ``result`` waits.
    """

    references: Mapping[str, Any]
    phase: str
    timeout_s: float
    error: type[SlimeLikeError]
    watch: Callable[[], None] = watch_none
    before: Callable[[float | None], None] | None = None

    def result(
        self, timeout_s: float | None = None, on_waiting: Callable[[Sequence[str]], None] = ignore_answers
    ) -> list[_Answer]:
        """Wait for all answers, and for calls that were deferred before. The first failure ends the wait, as ``error``.

        Args:
            on_waiting: called with the names that have not answered yet, at the start and then after every answer.
        """
        if self.before is not None:
            self.before(timeout_s)
        waiting, bound = {reference: name for name, reference in self.references.items()}, timeout_s or self.timeout_s
        values, deadline = dict[Any, Any](), time.monotonic() + bound
        on_waiting(list(waiting.values()))
        while waiting:
            # Wait for one at a time: a dead rank's peers hang in a collective, so its failure must be seen first.
            remaining = max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=min(remaining, _LOOK_EVERY_S))
            raise_if_interrupted()
            if ready:
                name = waiting.pop(ready[0])
                values[ready[0]] = fetch(ready[0], name, phase=self.phase, timeout_s=bound, error=self.error)
                on_waiting(list(waiting.values()))
                continue
            self.watch()
            if remaining <= _LOOK_EVERY_S:
                late = ", ".join(waiting.values())
                raise self.error(
                    f"{late} gave no answer within {bound:.0f} s while {self.phase}",
                    code="no-answer",
                    remedy="see the worker logs",
                )
        return [values[reference] for reference in self.references.values()]

    def is_answered(self) -> bool:
        """Return whether all actors have answered. Raises the error of a failed one. Never waits."""
        asked = list(self.references.values())
        ended, running = ray.wait(asked, num_returns=len(asked), timeout=0)
        for name, reference in self.references.items():
            if reference in ended:
                fetch(reference, name, phase=self.phase, error=self.error)
        return not running


class ActorGroup:
    """The Ray actors of one kind, in order, and typed calls to them. An actor runs its calls in the order of the calls.

    A method is given as a function of the actor's class, so its arguments and answers are typed. Every call names its
    phase ("scoring") for messages.

    Args:
        timeout_s: default bound of every wait, in seconds.
        error: class of errors about an actor that fails, dies or is late.
        watch: see ``Answers``.

    Attributes:
        actors, names: Ray's handles, and what messages call them ("trainer rank 3").
    """

    def __init__(self, timeout_s: float, error: type[SlimeLikeError], watch: Callable[[], None] = watch_none) -> None:
        self.actors: list[Any] = []
        self.names: list[str] = []
        self.timeout_s = timeout_s
        self._error = error
        self._watch = watch
        self._deferred: list[Answers[Any]] = []

    def call(
        self, phase: str, method: Callable[Concatenate[Any, _P], _Answer], /, *arguments: _P.args, **options: _P.kwargs
    ) -> list[_Answer]:
        """Call every actor with the same arguments, and wait for all answers."""
        return self.start(phase, method, *arguments, **options).result()

    def start(
        self, phase: str, method: Callable[Concatenate[Any, _P], _Answer], /, *arguments: _P.args, **options: _P.kwargs
    ) -> "Answers[_Answer]":
        """Call every actor without waiting."""
        return self.start_each(phase, method, dict.fromkeys(range(len(self.actors)), arguments), **options)

    def start_each(
        self, phase: str, method: Callable[..., _Answer], arguments: Mapping[int, tuple[Any, ...]], **options: Any
    ) -> "Answers[_Answer]":
        """Call some actors, each with the arguments under its index, without waiting."""
        sent = {
            self.names[index]: getattr(self.actors[index], method.__name__).remote(*values, **options)
            for index, values in arguments.items()
        }
        return Answers(sent, phase, self.timeout_s, self._error, self._watch, before=self.settle)

    def defer(self, answers: "Answers[Any]") -> None:
        """Don't wait for ``answers``. The next call that waits, or ``is_idle``, raises a failure."""
        self._deferred.append(answers)

    def is_idle(self) -> bool:
        """Return whether all deferred calls are answered. Raises a failure among them once. Never waits."""
        deferred, self._deferred = self._deferred, []
        self._deferred = [answers for answers in deferred if not answers.is_answered()]
        return not self._deferred

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait for every deferred call. Each bound starts when the previous call has ended."""
        deferred, self._deferred = self._deferred, []
        for answers in deferred:
            answers.result(timeout_s)

    def liveness(self, phase: str) -> Callable[[], None]:
        """Return a check that raises if one of these actors has died, to call while others are waited for.

        It never waits, since busy actors answer late: at most every two seconds, it reads the answers to its last
        questions and asks again. Callable from any thread.
        """
        actors, asked = dict(zip(self.names, self.actors, strict=True)), dict[str, Any]()
        lock, due = threading.Lock(), 0.0

        def check() -> None:
            nonlocal due
            with lock:
                if time.monotonic() < due:
                    return
                due = time.monotonic() + _ASK_EVERY_S
                for name, actor in actors.items():
                    if (answer := asked.get(name)) is not None:
                        if not ray.wait([answer], timeout=0)[0]:
                            continue
                        fetch(answer, name, phase=phase, error=self._error)
                    asked[name] = actor.__ray_ready__.remote()

        return check

    def shutdown(self, method: Callable[[Any], object], timeout_s: float) -> None:
        """End the actors with ``method`` of theirs, and kill those that don't answer within ``timeout_s``."""
        end_actors(self.actors, [getattr(actor, method.__name__).remote() for actor in self.actors], timeout_s)
        self.actors, self.names, self._deferred = [], [], []


def end_actors(actors: Sequence[Any], references: Sequence[Any], timeout_s: float) -> None:
    """Wait for the calls that end the actors, then kill them. Once Ray's own daemons have ended, no answer comes."""
    node, deadline = own_node(), time.monotonic() + timeout_s
    while references and (remaining := deadline - time.monotonic()) > 0:
        _, references = ray.wait(references, num_returns=len(references), timeout=min(remaining, _ASK_EVERY_S))
        if node is not None and node.ended_daemon() is not None:
            break
    for actor in actors:
        ray.kill(actor)


def fetch(
    reference: Any, name: str, *, phase: str, timeout_s: float = _READY_TIMEOUT_S, error: type[SlimeLikeError]
) -> Any:
    """Fetch the value of one reference, ready unless a bound is given, or raise a sentence about the failure."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError as cause:
        raise error(f"{name} gave no answer within {timeout_s:.0f} s while {phase}", code="no-answer") from cause
    except RayTaskError as cause:
        original = cause.cause
        if isinstance(original, SlimeLikeError):  # keep the class, so exit code and remedy survive
            raise locate_error(original, name, phase) from cause
        what = f"{type(original).__name__}: {_first_line(original)}"
        raise error(f"{name} failed while {phase}: {what}", code="worker-failed") from cause
    except RayActorError as cause:
        raise error(f"{name} died while {phase}: {_death(cause, name)}", code="worker-died") from cause
    except OutOfMemoryError as cause:
        raise error(
            f"{name} died while {phase}: {_memory(cause)}",
            code="node-out-of-memory",
            remedy="run fewer ranks and engines per node, or lower trainer.target_tokens_per_batch or "
            "rollout.max_concurrent_requests; close other programs",
        ) from cause
    except RayError as cause:
        raise error(f"{name} failed while {phase}: {_first_line(cause)}", code="worker-failed") from cause


def locate_error(original: _Error, name: str, phase: str) -> _Error:
    """Return the same error with who was doing what."""
    if name in str(original) or isinstance(original, ConfigError):  # ConfigError names fields already
        return original
    within = ", ".join(filter(None, (original.who, original.phase)))
    same = copy.copy(original)
    same.who, same.phase = name, phase
    same.problem = f"{within}: {original.problem}" if within else original.problem
    return same


def _death(cause: RayActorError, name: str) -> str:
    """Describe an actor's death. Ray reports only the process id. ``node.use_log`` names the log."""
    process = re.search(r"^\s*pid: (\d+)$", str(cause), re.MULTILINE)
    if process is None or "worker process has died" not in str(cause):
        return _first_line(cause)
    log = _ROLE.sub(r"\1-\2*.log", name)
    return f"its process {process[1]} ended without an exception; {LIKELY_KILLER}, and its log is {log} in worker_logs"


def _memory(cause: OutOfMemoryError) -> str:
    """Describe what Ray's memory monitor saw, without the addresses and Ray options in its message."""
    used = re.search(r"([\d.]+GB) used / ([\d.]+GB)", str(cause))
    seen = f" ({used[1]} of {used[2]} were used)" if used else ""
    return f"Ray ended its process because the node was running out of memory{seen}"


def _first_line(error: BaseException | None) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
