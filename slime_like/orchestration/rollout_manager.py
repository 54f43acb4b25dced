"""Engines behind one door: requests go to the engine with the least outstanding tokens, answers come back in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import ray

from slime_like.config import RunConfig
from slime_like.errors import EngineError
from slime_like.interfaces import BucketMetadata, Generation, GenerationRequest, UpdateReceipt
from slime_like.interrupts import raise_if_interrupted
from slime_like.orchestration.calls import gather, one
from slime_like.orchestration.engine_actor import EngineActor
from slime_like.orchestration.placement import Placement
from slime_like.orchestration.worker_registry import WorkerRegistry

# Longest silence between looks at the engines' health while requests run.
_POLL_S = 5.0


class RolloutManager:
    """The generation pool."""

    def __init__(self, config: RunConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._engines: list[Any] = []
        self._registry = WorkerRegistry(config.rollout.max_concurrent_requests)

    # -------------------------------------------------------------------------------------------------------- start
    def launch(self, shared_devices: Sequence[str] = ()) -> None:
        """Create the actors; they import in the background until ``start`` waits for them.

        Args:
            shared_devices: the device of every trainer rank, for colocated engines.
        """
        actor = ray.remote(EngineActor)
        for index in range(self._config.rollout.num_engines):
            devices = ",".join(shared_devices[rank] for rank in self._placement.shared_ranks(index) if shared_devices)
            options = self._placement.engine_options(index)
            self._engines.append(
                actor.options(**options, max_restarts=0, max_concurrency=10_000).remote(self._config, index, devices)
            )

    def start(self) -> None:
        """Wait until every engine has loaded the model; bounded by ``rollout.start_timeout_s``."""
        # The engine bounds its own start; the slack here is for the actor's imports.
        self._call("start", phase="starting", timeout_s=self._config.rollout.start_timeout_s + 120)
        for index in range(len(self._engines)):
            self._registry.join(index)

    @property
    def num_engines(self) -> int:
        return len(self._engines)

    # --------------------------------------------------------------------------------------------------- generation
    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """All responses of every request, in the order of the requests.

        Raises:
            EngineError: an engine died, refused, or a request outlived ``rollout.request_timeout_s``.
        """
        queue = deque(enumerate(requests))
        running: dict[Any, tuple[int, int, int]] = {}  # reference -> (position, engine, tokens)
        answers: dict[int, list[Generation]] = {}
        last_answer = time.monotonic()
        while queue or running:
            raise_if_interrupted()
            self._submit(queue, running)
            ready, _ = ray.wait(list(running), num_returns=len(running), timeout=0.005)
            if not ready:
                ready, _ = ray.wait(list(running), num_returns=1, timeout=_POLL_S)
            for reference in ready:
                position, engine, tokens = running.pop(reference)
                answers[position] = self._answer(reference, engine)
                self._registry.release(engine, tokens)
            last_answer = self._bounded(last_answer, bool(ready), running)
        return [answers[position] for position in range(len(requests))]

    def _submit(self, queue: deque[tuple[int, GenerationRequest]], running: dict[Any, tuple[int, int, int]]) -> None:
        while queue:
            position, request = queue[0]
            tokens = len(request.prompt_tokens) + request.num_samples * request.sampling.max_new_tokens
            engine = self._registry.acquire(tokens)
            if engine is None:
                return
            queue.popleft()
            running[self._engines[engine].generate.remote(request)] = (position, engine, tokens)

    def _answer(self, reference: Any, engine: int) -> list[Generation]:
        timeout = self._config.rollout.request_timeout_s
        answer: list[Generation] = one(
            reference, self._name(engine), phase="generating", timeout_s=timeout, error=EngineError
        )
        return answer

    def _bounded(self, last_answer: float, answered: bool, running: dict[Any, tuple[int, int, int]]) -> float:
        if answered or not running:
            return time.monotonic()
        # The engines bound each request themselves; this bound is for an engine that no longer answers at all.
        bound = self._config.rollout.request_timeout_s + 60
        if time.monotonic() - last_answer > bound:
            silent = sorted({self._name(engine) for _, engine, _ in running.values()})
            raise EngineError(f"{', '.join(silent)} answered nothing for {bound:.0f} s while generating")
        return last_answer

    # ------------------------------------------------------------------------------------------------------ weights
    def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        self._call("connect", transport, rendezvous, phase="joining the weight transport")

    def begin_update(self, version: int) -> None:
        self._call("begin_update", version, phase="beginning a weight update")

    def start_update(self, buckets: list[BucketMetadata]) -> list[Any]:
        """Let every engine fetch the buckets; returns at once with references for ``wait_update``."""
        return [engine.update.remote(buckets) for engine in self._engines]

    def wait_update(self, references: list[Any]) -> None:
        self._gather(references, phase="loading weights", timeout_s=self._config.sync.timeout_s)

    def finish_update(self, version: int) -> list[UpdateReceipt]:
        return self._call("finish_update", version, phase="finishing a weight update")

    def ask_each(self, request: GenerationRequest) -> list[Generation]:
        """The same one-sample request to every engine, past the registry."""
        return [answer[0] for answer in self._call("generate", request, phase="answering the weight-sync probe")]

    # -------------------------------------------------------------------------------------------------------- turns
    def sleep(self) -> None:
        self._call("sleep", phase="making room for the trainers")

    def wake(self, parts: Sequence[Literal["weights", "kv_cache"]]) -> None:
        self._call("wake", parts, phase="coming back to the device")

    # ---------------------------------------------------------------------------------------------------------- end
    def shutdown(self, timeout_s: float = 30.0) -> None:
        """Stop every engine and its processes; an unresponsive actor is killed."""
        references = [engine.stop.remote() for engine in self._engines]
        ray.wait(references, num_returns=len(references), timeout=timeout_s)
        for engine in self._engines:
            ray.kill(engine)
        self._engines = []

    # -------------------------------------------------------------------------------------------------------- calls
    def _name(self, engine: int) -> str:
        return f"engine {engine} ({self._config.rollout.engine})"

    def _call(self, method: str, *arguments: Any, phase: str, timeout_s: float | None = None) -> list[Any]:
        references = [getattr(engine, method).remote(*arguments) for engine in self._engines]
        return self._gather(references, phase=phase, timeout_s=timeout_s or self._config.sync.timeout_s)

    def _gather(self, references: list[Any], *, phase: str, timeout_s: float) -> list[Any]:
        names = [self._name(index) for index in range(len(references))]
        return gather(references, names, phase=phase, timeout_s=timeout_s, error=EngineError)
