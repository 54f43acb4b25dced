"""The actors of all engines: created, called together, and ended."""

import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from slime_like.config import RunConfig
from slime_like.errors import EngineError
from slime_like.interfaces import BucketMetadata, EngineHealth, GenerationRequest, Manifest
from slime_like.observability.waiting import ignore_answers
from slime_like.orchestration.cluster.placement import Placement
from slime_like.orchestration.cluster.ray_calls import Answers, end_actors, watch_none
from slime_like.orchestration.rollout.engine_actor import EngineActor, PartOptions
from slime_like.weights.transports.registry import for_engine

_HEALTH_TIMEOUT_S = 15.0
_STOP_TIMEOUT_S = 10.0
_THREADS = "OMP_NUM_THREADS"
_JOINING = "joining the weight transport"
_TOGETHER_S = 0.002
"""Wait for requests that end with the same token. They end one after the other, within less time."""


class EngineGroup:
    """One actor per engine, numbered from 0. If a call fails on some engines, the first failure is raised.

    Args:
        watch: called while waiting for engines; raises if an actor that they depend on has died.
    """

    def __init__(self, config: RunConfig, placement: Placement, watch: Callable[[], None] = watch_none) -> None:
        self._config = config.for_gpu_engines() if placement.device == "GPU" else config
        self._placement = placement
        self._watch = watch
        self._shared_devices: Sequence[str] = ()
        self._actors: list[Any] = []

    def __len__(self) -> int:
        return len(self._actors)

    def actor(self, index: int) -> Any:
        return self._actors[index]

    @property
    def silence_s(self) -> float:
        """Seconds without an answer after which engines that have requests count as hung. Engines bound requests."""
        return self._config.silence_s + 60

    def name(self, index: int) -> str:
        return f"engine {index} ({self._config.rollout.engine})"

    # ------------------------------------------------------------------------------------------------ start and end
    def launch(self, shared_devices: Sequence[str] = ()) -> None:
        """Create the actors. They import in the background until ``start`` waits for them.

        Args:
            shared_devices: device of every trainer rank, for colocated engines.
        """
        self._shared_devices = shared_devices
        for index in range(self._config.rollout.num_engines):
            self._actors.append(self._new_actor(index))

    def _new_actor(self, index: int) -> Any:
        first, *others = [self._part(index, part) for part in range(self._placement.engine_nodes)]
        actor = ray.remote(EngineActor).options(**first.options, max_restarts=0, max_concurrency=10_000)
        return actor.remote(self._config, index, first.devices, others)

    def _part(self, index: int, part: int) -> PartOptions:
        """Return the options of an engine's actor on one of its nodes."""
        shared, options = self._shared_devices, self._placement.engine_options(index, part)
        devices = ",".join(shared[rank] for rank in self._placement.shared_ranks(index, part) if shared)
        environment: dict[str, Any] = {"env_vars": self._environment(index, part)}
        if (python := self._config.rollout.python) is not None:
            environment["py_executable"] = shlex.quote(str(python))  # Ray passes it to a shell
        return PartOptions({**options, "runtime_env": environment}, devices)

    def _environment(self, index: int, part: int) -> dict[str, str]:
        """Return CPU thread settings, which torch reads on import. Ray would set one thread. The user's values stay."""
        if self._placement.device == "GPU" or _THREADS in os.environ:
            return {}
        cores = len(os.sched_getaffinity(0))
        return {_THREADS: str(max(1, cores // self._placement.ranks_beside_engine(index, part)))}

    def start(
        self,
        left: Callable[[Sequence[str]], None] = ignore_answers,
        phase: str = "starting",
        indexes: Iterable[int] | None = None,
    ) -> None:
        """Wait until the engines (default: all) have loaded the model, within ``rollout.start_timeout_s``.

        Args:
            left: called with the engines that are not ready yet.
        """
        # The engine bounds its start. The extra time is for the actor's imports.
        self.ask("start", phase=phase, indexes=indexes).result(self._config.engine_start_timeout_s + 120, left)

    def restart_engines(self, indexes: Sequence[int]) -> None:
        """End these engines and start others in their places. Raises ``EngineError`` if one does not start."""
        for index in indexes:
            old = self._actors[index]
            end_actors([old], [old.stop.remote()], _STOP_TIMEOUT_S)
            self._actors[index] = self._new_actor(index)
        self.start(phase="starting again", indexes=indexes)

    @staticmethod
    def is_alive(actor: Any) -> bool:
        """Ask an engine's actor, within a bound. Return False without an answer."""
        try:
            health: EngineHealth = ray.get(actor.health.remote(), timeout=_HEALTH_TIMEOUT_S)
        except RayError:  # a dead actor, or one that does not answer
            return False
        return health.alive

    def shutdown(self, timeout_s: float = 30.0) -> None:
        """Stop every engine and its processes. Unresponsive actors are killed."""
        end_actors(self._actors, [actor.stop.remote() for actor in self._actors], timeout_s)
        self._actors = []

    # ------------------------------------------------------------------------------------------------------ weights
    def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        """Connect every engine to the transport; a colocated engine, to the trainer ranks whose devices it uses."""
        connected = [
            self.ask("connect", transport, for_engine(rendezvous, ranks.start), phase=_JOINING, indexes=[index])
            for index, ranks in enumerate(map(self._placement.shared_ranks, range(len(self))))
        ]
        for answers in connected:
            answers.result()

    def begin_update(self, version: int, manifests: Answers[Manifest | None]) -> Answers[Any]:
        """Have every engine begin once all trainers have answered with their manifests. Returns immediately."""
        return self.ask("begin_update", version, *manifests.references.values(), phase="beginning a weight update")

    def update(self, buckets: list[BucketMetadata], before: Answers[Any]) -> Answers[Any]:
        """Have every engine fetch and load the buckets once all engines have answered ``before``. Returns immediately.

        Ray starts the call, without a round trip through this process.
        """
        return self.ask("update", buckets, *before.references.values(), phase="loading weights")

    def finish_update(self, version: int, before: Answers[Any]) -> Answers[Any]:
        """Have every engine finish, like ``update``. The answers are an ``UpdateReceipt`` each."""
        return self.ask("finish_update", version, *before.references.values(), phase="finishing a weight update")

    def probe(self, request: GenerationRequest) -> Answers[Any]:
        """Send the same request to every engine, bypassing the pool. Returns immediately."""
        return self.ask("generate", request, phase="answering the weight-sync probe")

    # -------------------------------------------------------------------------------------------------------- calls
    def wait(self, references: Sequence[Any], timeout_s: float) -> list[Any]:
        """Return the references that are ready soon after the first one, or none after ``timeout_s``."""
        ready, _ = ray.wait(list(references), num_returns=1, timeout=timeout_s)
        self._watch()
        if ready:
            ready, _ = ray.wait(list(references), num_returns=len(references), timeout=_TOGETHER_S)
        return list(ready)

    @staticmethod
    def cancel(reference: Any) -> None:
        """End the call that would answer ``reference``. Returns immediately."""
        ray.cancel(reference)

    def ask(self, method: str, *arguments: Any, phase: str, indexes: Iterable[int] | None = None) -> Answers[Any]:
        """Call a method of all engines, or of ``indexes``. Returns immediately."""
        asked = range(len(self)) if indexes is None else indexes
        references = {self.name(i): getattr(self._actors[i], method).remote(*arguments) for i in asked}
        return Answers(references, phase, self._config.sync.timeout_s, EngineError, self._watch)
