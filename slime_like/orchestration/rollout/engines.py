"""The run's engines: their actors, the requests to them, and the replacement of dead ones.

A failed call reveals a death; there is no heartbeat. A dead engine is taken out of service as soon as its death is
detected, and its requests are sent again to others, from the beginning. It is replaced at the next weight sync, or
immediately if no engine serves. Without a restart left in this hour, the error ends the run.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from pathlib import Path
from typing import Any, Literal

from slime_like.config import RunConfig
from slime_like.config.sections import ProfileConfig
from slime_like.errors import EngineError
from slime_like.interfaces import Generation, GenerationRequest
from slime_like.observability.timing import ignore_answers
from slime_like.orchestration.cluster.placement import Placement
from slime_like.orchestration.cluster.ray_calls import Answers, end_actors, watch_none
from slime_like.orchestration.rollout.engine_instance import Dispatcher, EngineCall, EngineInstance
from slime_like.orchestration.rollout.requests import all_or_none
from slime_like.orchestration.trainer.model_ranks import ModelRanks
from slime_like.system.budget import HourlyBudget
from slime_like.system.interrupts import raise_if_interrupted
from slime_like.system.loop_thread import LoopThread
from slime_like.system.spans import Spans
from slime_like.weights.transports.registry import for_engine

_IMPORTS_S = 120.0
"""Time for an actor's imports. The engine bounds its start."""
_STOP_TIMEOUT_S = 10.0
_LOOK_EVERY_S = 0.2


class Engines:
    """All engines. An event loop in a daemon thread sends their requests, and one thread makes all other calls.

    Without ``replace_and_sync``, engines serve the weights that they load at their start.

    Args:
        watch: called while waiting for engines; raises if an actor that they depend on has died.
        note: called with a sentence about every replaced engine.

    Attributes:
        instances: one start of each engine, numbered from 0.
        restarts: budget of replacements.
        replace_and_sync: replaces dead engines and makes all serve the current weights; set by ``WeightSync``.
        thread: runs ``generate``.
    """

    def __init__(
        self,
        config: RunConfig,
        placement: Placement,
        note: Callable[[str], None],
        watch: Callable[[], None] = watch_none,
    ) -> None:
        self._config = config.for_gpu_engines() if placement.device == "GPU" else config
        self._placement = placement
        self._watch = watch
        self._note = note
        self._shared_devices: Sequence[str] = ()
        self.instances: list[EngineInstance] = []
        self.restarts = HourlyBudget(config.rollout.max_engine_restarts)
        self.replace_and_sync: Callable[[], object] | None = None
        self.thread = LoopThread()
        self._lock = threading.Lock()  # guards deaths
        self._dispatcher = Dispatcher(self.thread, self.instances, config.rollout.max_concurrent_requests)

    # ------------------------------------------------------------------------------------------------ start and end
    def launch(self, shared_devices: Sequence[str] = ()) -> None:
        """Create the actors. They import in the background until ``start`` waits for them.

        Args:
            shared_devices: device of every trainer rank, for colocated engines.
        """
        self._shared_devices = shared_devices
        for index in range(self._config.rollout.num_engines):
            self.instances.append(EngineInstance.launch(self._config, self._placement, index, shared_devices))

    def start(self, on_waiting: Callable[[Sequence[str]], None] = ignore_answers) -> None:
        """Wait until every engine has loaded the model, within ``rollout.start_timeout_s``, then let all serve.

        Args:
            on_waiting: called with the engines that are not ready yet.
        """
        self.ask("start", phase="starting").result(self._config.engine_start_timeout_s + _IMPORTS_S, on_waiting)
        self.admit()

    def shutdown(self, timeout_s: float = 30.0) -> None:
        """Stop every engine and its processes. Unresponsive actors are killed."""
        actors = [instance.actor for instance in self.instances]
        end_actors(actors, [actor.stop.remote() for actor in actors], timeout_s)
        self.instances.clear()
        self.thread.close()

    # -------------------------------------------------------------------------------------------------------- calls
    def ask(
        self, method: str, *arguments: Any, phase: str, instances: Sequence[EngineInstance] | None = None
    ) -> Answers[Any]:
        """Call a method of all engines, or of ``instances``. Returns immediately.

        Ray starts the call when the arguments that are references have arrived.
        """
        asked = self.instances if instances is None else instances
        references = {each.name: getattr(each.actor, method).remote(*arguments) for each in asked}
        return Answers(references, phase, self._config.sync.timeout_s, EngineError, self._watch)

    def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        """Connect every engine to the transport; a colocated engine, to the trainer ranks whose devices it uses."""
        connected = []
        for each in self.instances:
            own = for_engine(rendezvous, self._placement.shared_ranks(each.index).start)
            connected.append(
                self.ask("connect", transport, own, phase="joining the weight transport", instances=[each])
            )
        for answers in connected:
            answers.result()

    def sleep(self, keep_weights: bool) -> None:
        """Make living engines release device memory. Parts that are already asleep stay asleep."""
        self._ask_living("sleep", "making room for the trainers", keep_weights)

    def wake(self, parts: Sequence[Literal["weights", "kv_cache"]]) -> None:
        """Make living engines reclaim these parts of the device memory."""
        self._ask_living("wake", "coming back to the device", parts)

    def take_spans(self) -> dict[str, Spans]:
        """Return what living engines recorded of environments and agents since the last call, by process."""
        return {f"engine {each.index}": spans for each, spans in self._ask_living("take_spans", "reporting spans")}

    def _ask_living(self, method: str, phase: str, *arguments: Any) -> list[tuple[EngineInstance, Any]]:
        """Call every engine that is not known to be dead, and record deaths that this reveals. Return the answers.

        Raises:
            EngineError: a living engine failed, or a dead one may not be replaced.
        """
        living = [each for each in self.instances if each.death is None]
        asked = [self.ask(method, *arguments, phase=phase, instances=[each]) for each in living]
        found = []
        for each, answers in zip(living, asked, strict=True):
            try:
                found.append((each, answers.result()[0]))
            except EngineError as error:
                if not self.find_dead(error, [each]):
                    raise
        return found

    def profile(self, settings: ProfileConfig, directory: Path | None) -> None:
        """Start to trace the chosen engines, or, with a directory, write their traces there."""
        for each in self.instances:
            if each.index in settings.engines and each.death is None:
                path = directory and str(directory / f"engine-{each.index}")
                self.ask("profile", path, settings.memory, phase="profiling", instances=[each]).result()

    # ---------------------------------------------------------------------------------------- deaths and replacement
    @property
    def serving(self) -> list[EngineInstance]:
        """Living engines with the current weights."""
        return [each for each in self.instances if each.serves]

    @property
    def dead(self) -> list[EngineInstance]:
        """Dead engines that have not been replaced."""
        return [each for each in self.instances if each.death is not None]

    def find_dead(self, error: Exception, instances: Sequence[EngineInstance] | None = None) -> bool:
        """Check after a failed call whether ``instances`` (default: all) are alive, and record which are dead.

        Returns:
            True if some are dead and may be replaced. If not enough restarts are left, ``error`` must end the run.
        """
        asked = self.instances if instances is None else instances
        death = error if isinstance(error, EngineError) else EngineError(str(error), code="engine-died")
        unknown = [each for each in asked if each.death is None and self._restarts_left > 0]
        with ThreadPoolExecutor(max(1, len(unknown))) as threads:
            alive = list(threads.map(lambda each: each.is_alive(), unknown))
        with self._lock:
            answers = zip(unknown, alive, strict=True)
            found = [each for each, lives in answers if not lives and each.death is None]  # or another thread was first
            for each in found if len(found) <= self._restarts_left else ():
                each.death, each.serves = death, False
        for each in found:
            self.thread.call_soon(partial(_end_lost, each))
        return any(each.death is not None for each in asked)

    @property
    def _restarts_left(self) -> int:
        return self.restarts.left - len(self.dead)

    def replace_dead(self) -> None:
        """Start dead engines again. They serve nothing until ``admit``, since they need the current weights first.

        Raises:
            EngineError: an engine did not start.
        """
        dead = self.dead
        for each in dead:
            end_actors([each.actor], [each.actor.stop.remote()], _STOP_TIMEOUT_S)
        with self._lock:
            for index in (each.index for each in dead):
                shared = self._shared_devices
                self.instances[index] = EngineInstance.launch(self._config, self._placement, index, shared)
            self.restarts.use(len(dead))
        started = self.ask("start", phase="starting again", instances=[self.instances[each.index] for each in dead])
        started.result(self._config.engine_start_timeout_s + _IMPORTS_S)
        for each in dead:
            self._note(f"{each.name} was restarted ({each.death})")

    def admit(self) -> None:
        """Let all living engines serve. They must have the current weights."""
        with self._lock:
            for each in self.instances:
                each.serves = each.death is None
                each.last_answer = time.monotonic()  # requests stood still
        self.thread.call_soon(self._dispatcher.send)

    def check(self) -> None:
        """Raise what must end the run, and replace engines if none serves. Call every few seconds of a wait for
        answers, from the thread that can send weights.

        Raises:
            KeyboardInterrupt: a signal was noted.
            EngineError: an engine has not answered for too long, or the last one died and cannot be replaced.
        """
        raise_if_interrupted()
        self._watch()
        silence_s = self._config.silence_s + 60  # engines bound requests
        latest = time.monotonic() - silence_s
        if silent := [each for each in self.instances if each.calls and each.last_answer < latest]:
            names = ", ".join(each.name for each in silent)
            problem = f"{names} gave no answer for {silence_s:.0f} s while generating"
            if not self.find_dead(error := EngineError(problem, code="engines-silent"), silent):
                raise error
        if self.serving:
            return
        if not self.dead:
            raise EngineError("no engine has been started", code="no-engine")
        if self.replace_and_sync is not None:
            self.replace_and_sync()
        else:
            self.replace_dead()
            self.admit()

    # ----------------------------------------------------------------------------------------------------- requests
    def generate_all(
        self, requests: Sequence[GenerationRequest], answered: Callable[[int], None] = ignore_answers
    ) -> list[list[Generation]]:
        """Return all responses of every request, in request order. Call where a weight sync is possible.

        Args:
            answered: called with the number of answered requests whenever it may have changed.

        Raises:
            EngineError: see ``check`` and ``generate``.
        """
        done = 0

        async def generate(request: GenerationRequest) -> list[Generation]:
            nonlocal done
            found = await self.generate(request)
            done += 1
            return found

        future = self.thread.start(all_or_none([generate(request) for request in requests]))
        try:
            while not wait_for([future], _LOOK_EVERY_S).done:
                self.check()
                answered(done)
            answered(done)
            return future.result()
        finally:
            future.cancel()

    async def generate(self, request: GenerationRequest, resent: Callable[[], None] = lambda: None) -> list[Generation]:
        """Return the responses of the least loaded engine. Waits while all are full or dead. Runs in ``thread``.

        Args:
            resent: called when the engine died, before the request is sent again.

        Raises:
            EngineError: an engine refused the request, did not answer it within ``rollout.request_timeout_s``, or died
                and has no restart left.
        """
        order = next(self._dispatcher.orders)
        while True:
            call = EngineCall(request, order)
            engine = await self._dispatcher.serve(call)
            try:
                return call.result(engine)
            except EngineError as error:
                if not await asyncio.to_thread(self.find_dead, error, [engine]):
                    raise
            resent()


def _end_lost(engine: EngineInstance) -> None:
    """End the calls of a dead engine, which may never be answered."""
    for call in engine.calls if engine.death is not None else ():
        call.ended.set()


class DeviceSwitch:
    """Turns on devices. Each method runs before a phase, and returns after the move.

    A shared device never holds optimizer state and KV cache at the same time. A sync hands over: gradients and
    optimizer state leave, engine weights come, buckets are sent, trainer weights leave, the KV cache comes.

    Dead engines leave the pool as soon as their death is detected. The others continue.

    Args:
        shared: trainers and engines on the same devices; ``None``: on separate devices, where nothing moves.
    """

    def __init__(self, shared: tuple[ModelRanks, Engines] | None = None) -> None:
        self._turn: Literal["trainers", "engines"] | None = None
        if shared is not None:
            self._trainers, self._engines = shared
            self._turn = "trainers"

    def starting_engines(self) -> None:
        """Take trainers off the devices: a starting engine takes all the memory that it is allowed."""
        if self._turn == "trainers":
            self._trainers.offload()
            self._turn = "engines"

    def training(self, keep_weights: bool = False) -> None:
        """Prepare the devices for scoring, training and saving.

        Args:
            keep_weights: whether engines keep their weights, to sample again without a weight sync.
        """
        if self._turn == "engines":
            self._engines.sleep(keep_weights)
            self._trainers.onload()
            self._turn = "trainers"

    def generation(self) -> None:
        """Prepare the devices for sampling."""
        if self._turn == "trainers":
            self._trainers.offload()
            self._engines.wake(("weights", "kv_cache"))
            self._turn = "engines"

    def begin_sync(self) -> None:
        """Prepare for a weight sync, in which trainers and engines both hold weights."""
        self.training()
        if self._turn is not None:
            self._trainers.offload(keep_weights=True)
            self._engines.wake(("weights",))

    def end_sync(self) -> None:
        """Give the devices to the engines after a sync."""
        if self._turn is not None:
            self._trainers.offload()
            self._engines.wake(("kv_cache",))
            self._turn = "engines"
