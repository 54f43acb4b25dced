"""Played engines: where requests go, what a death costs, and the weights and memory of replacements."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from slime_like.checks.engines import chosen_transport
from slime_like.config import RunConfig
from slime_like.errors import EngineError, RewardError, SlimeLikeError, WeightSyncError
from slime_like.interfaces import (
    BucketMetadata,
    Generation,
    GenerationRequest,
    Manifest,
    PromptInput,
    RequestBatch,
    SamplingParams,
    UpdateReceipt,
)
from slime_like.orchestration import weight_sync
from slime_like.orchestration.rollout import engine_instance
from slime_like.orchestration.rollout import engines as module
from slime_like.orchestration.rollout.engine_instance import EngineInstance
from slime_like.orchestration.rollout.engines import DeviceSwitch, Engines
from slime_like.orchestration.rollout.sync_probe import Probe
from slime_like.orchestration.weight_sync import WeightSync
from slime_like.system import budget
from tests.support.pending import Later, OneRank
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import write_checkpoint

STEPS = 2
ANSWER = [Generation(np.array([7]), np.zeros(1, np.float32), np.array([0]), "stop")]


def request(name: str) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt=PromptInput([5, 6]), sampling=SamplingParams(max_new_tokens=8))


@dataclass
class Reference:
    """Ray's reference to an answer."""

    ended: "Future[list[Generation]]" = field(default_factory=Future)
    is_cancelled: bool = False

    def future(self) -> "Future[list[Generation]]":
        return self.ended


class Engine:
    """An engine's actor. Ray's calls of a dead one fail, unless it hangs.

    Attributes:
        calls: references by the name of their request, in order. ``batches`` has their batches.
        memory, joined, version: parts on the device, whether it has joined the transport, and what it serves. It serves
            nothing during an update.
    """

    def __init__(self) -> None:
        self.alive, self.hangs, self.answers_all = True, False, False
        self.calls: dict[str, Reference] = {}
        self.batches: list[RequestBatch | None] = []
        self.memory = {"weights", "kv_cache"}
        self.joined = False
        self.version: int | None = 0
        self.generate = SimpleNamespace(remote=self._generate)
        self.stop = SimpleNamespace(remote=lambda: None)
        self.before_call: Callable[[], None] = lambda: None

    @property
    def has(self) -> list[str]:
        return [name for name, call in self.calls.items() if not call.ended.done()]

    def end(self, *names: str, error: SlimeLikeError | None = None) -> None:
        for name in names:
            ended = self.calls[name].ended
            ended.set_exception(error) if error is not None else ended.set_result(ANSWER)

    def die(self, hangs: bool = False) -> None:
        self.alive, self.hangs = False, hangs
        if not hangs:
            self.end(*self.has, error=EngineError("its process died"))

    def _generate(self, request: GenerationRequest) -> Reference:
        self.before_call()
        call = self.calls[request.request_id] = Reference()
        self.batches.append(request.batch)
        if self.answers_all or not self.alive:
            self.end(request.request_id, error=None if self.alive else EngineError("its process died"))
        return call


class PlayedEngines(Engines):
    """Engines whose calls, except ``generate``, happen when their answers are awaited.

    Engine 0 may die right before its call number ``dies_at``.
    """

    trainers: set[str]  # parts on the devices
    shared = False
    calls = 0
    dies_at: int | None = None

    @property
    def all(self) -> list[Engine]:
        return [cast(Engine, each.actor) for each in self.instances]

    def ask(self, method: str, *arguments: Any, phase: str, instances: Any = None) -> Any:
        asked = self.instances if instances is None else instances
        return Later(lambda: [self._called(each, method, *arguments) for each in asked])

    def _called(self, instance: EngineInstance, method: str, *arguments: Any) -> Any:
        engine = cast(Engine, instance.actor)
        if method == "start":
            engine.before_call = lambda: self.touch(instance.index)
            return None
        for before in arguments[1:] if method in ("begin_update", "update", "finish_update") else ():
            before.result()
        self.touch(instance.index)
        if not engine.alive:
            raise EngineError(f"{instance.name} died")
        return getattr(self, f"_{method}")(engine, *arguments)

    def touch(self, index: int) -> None:
        self.calls += index == 0
        if index == 0 and self.calls == self.dies_at:
            self.all[0].die()

    def _connect(self, engine: Engine, transport: str, rendezvous: object) -> None:
        engine.joined = True

    def _begin_update(self, engine: Engine, version: int, *manifests: object) -> None:
        assert engine.joined and "weights" in engine.memory and "weights" in self.trainers
        assert not self.shared or engine.memory == self.trainers == {"weights"}
        engine.version = None

    def _update(self, engine: Engine, buckets: object, *before: object) -> None: ...

    def _finish_update(self, engine: Engine, version: int, *before: object) -> UpdateReceipt:
        engine.version = version
        return UpdateReceipt(version, {})

    def _sleep(self, engine: Engine, keep_weights: bool) -> None:
        if not keep_weights and "weights" in engine.memory:
            engine.version = None
        engine.memory.clear()
        self.look()

    def _wake(self, engine: Engine, parts: Sequence[str]) -> None:
        assert not engine.memory & set(parts), "it is already there"
        engine.memory.update(parts)
        self.look()

    def look(self) -> None:
        """No shared device ever holds optimizer state and KV cache at the same time."""
        if self.shared and "state" in self.trainers:
            assert not any(engine.alive and "kv_cache" in engine.memory for engine in self.all)


class Trainers(OneRank):
    """A trainer group of one rank that sends one bucket."""

    def __init__(self, engines: PlayedEngines) -> None:
        self._engines = engines
        self._buckets: list[BucketMetadata] = []

    def offload(self, keep_weights: bool = False) -> None:
        self._engines.trainers &= {"weights"} if keep_weights else set()

    def onload(self) -> None:
        self._engines.trainers |= {"weights", "state"}
        self._engines.look()

    def open_transport(self, name: str, session: str, delta: bool) -> dict[str, Any]:
        return {}

    def begin_export(self) -> Manifest:
        self._buckets = [BucketMetadata("shm", {}, ())]
        return Manifest({})

    def next_bucket(self) -> BucketMetadata | None:
        return self._buckets.pop() if self._buckets else None

    def end_export(self) -> None: ...

    def probe(self, sequences: object) -> np.ndarray:
        return np.zeros(0)


@dataclass
class Run:
    """A loop of two steps without training."""

    engines: PlayedEngines
    turns: DeviceSwitch
    sync: WeightSync
    notes: list[str]
    version: int = 0

    def sample(self) -> None:
        self.turns.generation()
        self.turns.generation()  # an evaluation
        for engine in self.engines.all:
            engine.answers_all = True
        names = [f"request {number}" for number in range(2 * len(self.engines.instances))]
        assert self.engines.generate_all(list(map(request, names))) == [ANSWER] * len(names)
        for engine in self.engines.all:
            assert not engine.alive or (engine.version == self.version and engine.memory == {"weights", "kv_cache"})
            assert not self.engines.shared or not self.engines.trainers

    def train(self, keep_weights: bool = False) -> None:
        self.turns.training(keep_weights)
        if self.engines.shared:
            assert self.engines.trainers == {"weights", "state"}
            assert not any(engine.alive and engine.memory for engine in self.engines.all)

    def go(self) -> None:
        self.sync.run(0)
        for step in range(1, STEPS + 1):
            self.sample()
            self.train()
            self.train()  # a checkpoint
            self.sync.run(step)
            self.version = step
            if step == 1:
                self.train(keep_weights=True)  # a checkpoint, then sampling


@pytest.fixture
def engines_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PlayedEngines]]:
    def launched(config: object, placement: object, index: int, shared: object) -> EngineInstance:
        engine = Engine()
        engine.answers_all = any(each.index == index for each in made[-1].instances)  # replaces one
        return EngineInstance(index, f"engine {index}", engine)

    def fetched(reference: Reference, name: str, **_: Any) -> list[Generation]:
        return reference.ended.result()

    def cancelled(reference: Reference) -> None:
        reference.is_cancelled = True

    made: list[PlayedEngines] = []
    monkeypatch.setattr(EngineInstance, "launch", launched)
    monkeypatch.setattr(EngineInstance, "is_alive", lambda instance: instance.actor.alive)
    monkeypatch.setattr(module, "end_actors", lambda actors, references, timeout_s: None)
    monkeypatch.setattr(engine_instance, "ray", SimpleNamespace(cancel=cancelled))
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.002)
    monkeypatch.setattr(engine_instance, "fetch", fetched)
    write_checkpoint(tmp_path / "model")

    def engines(count: int = 1, capacity: int = 2, restarts: int = 2, placement: str = "separate") -> PlayedEngines:
        config = RunConfig(
            run_dir=tmp_path, model={"path": tmp_path / "model"}, steps=STEPS, sync={"verify": False},
            cluster={"placement": placement}, rollout={
                "num_engines": count, "max_engine_restarts": restarts, "max_concurrent_requests": capacity,
            },
        )  # fmt: skip
        notes = list[str]()
        placed: Any = SimpleNamespace(device="CPU", shared_ranks=lambda index: range(index, index + 1), notes=notes)
        found = PlayedEngines(config, placed, notes.append)
        found.trainers, found.shared = set(), placement == "colocated"
        made.append(found)
        found.launch()
        found.start()
        return found

    yield engines
    for each in made:
        each.thread.close()


@pytest.fixture
def make(engines_of: Callable[..., PlayedEngines]) -> Callable[..., Run]:
    def run(placement: str = "colocated", restarts: int = 2, count: int = 1, dies_at: int | None = None) -> Run:
        engines = engines_of(count, 9, restarts, placement)
        engines.dies_at, config = dies_at, engines._config
        trainers: Any = Trainers(engines)
        turns = DeviceSwitch()
        if placement == "colocated":
            engines.sleep(keep_weights=False)
            turns = DeviceSwitch((trainers, engines))
        trainers.onload()
        transport, probe = chosen_transport(config, on_cuda=False, num_hosts=1), Probe(config.model, None, 32, ())
        sync = WeightSync(config.sync, transport, config.model.dtype, probe, trainers, engines, turns, "run")
        sync.connect()
        return Run(engines, turns, sync, cast(Any, engines._placement).notes)

    return run


def calls_of(make: Callable[..., Run], placement: str, count: int) -> range:
    """Return the numbers of engine 0's calls in a run."""
    run = make(placement, count=count)
    first = run.engines.calls + 1
    run.go()
    return range(first, run.engines.calls + 1)


@pytest.mark.parametrize("placement", ["separate", "colocated"])
@pytest.mark.parametrize("count", [1, 2])
def test_an_engine_may_die_at_any_call(make: Callable[..., Run], placement: str, count: int) -> None:
    """A death costs one restart. In the end, every engine serves the last version."""
    calls = calls_of(make, placement, count)
    assert len(calls) >= 3 * 3 + STEPS  # three calls of three syncs, and the sampling of every step
    for dies_at in calls:
        run = make(placement, count=count, dies_at=dies_at)
        run.go()
        run.sample()  # finds a death at the very last call, which the next sync repairs
        run.sync.run(STEPS)
        assert run.engines.restarts.used == 1, dies_at
        assert [note.startswith("engine 0 was restarted (") for note in run.notes] == [True]
        assert len(run.engines.serving) == count
        assert all(engine.alive and engine.version == STEPS for engine in run.engines.all)


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_without_a_restart_left_the_first_death_ends_the_run(
    make: Callable[..., Run], placement: str, rejects: Rejects
) -> None:
    for dies_at in calls_of(make, placement, 1):
        with rejects(EngineError, "engine"):
            make(placement, restarts=0, dies_at=dies_at).go()


def test_deaths_beyond_the_budget_replace_nothing(make: Callable[..., Run], rejects: Rejects) -> None:
    run = make("separate", restarts=1, count=2)
    for engine in run.engines.all:
        engine.die()
    assert not run.engines.find_dead(EngineError("both died"))
    with rejects(EngineError, "engine"):
        run.sync.run(0)


def test_a_failure_of_a_living_engine_is_raised(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, rejects: Rejects
) -> None:
    run = make("colocated", count=2)
    assert not run.engines.find_dead(EngineError("refused"), run.engines.serving[:1])
    assert len(run.engines.serving) == 2
    monkeypatch.setattr(run.engines, "_sleep", Mock(side_effect=EngineError("engine 1 has no memory left")))
    with rejects(EngineError, "engine"):
        run.engines.sleep(keep_weights=True)


def test_no_death_excuses_a_failed_check(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, rejects: Rejects
) -> None:
    run = make("separate", count=2)

    def differ(*_: object) -> None:
        run.engines.all[0].die()
        raise WeightSyncError("a.weight arrived changed", code="tensors-differ")

    monkeypatch.setattr(weight_sync, "compare_checksums", differ)
    monkeypatch.setattr(run.sync, "_verifies", True)
    run.sync._probe.sequences = []
    with rejects(WeightSyncError, "tensors-differ"):
        run.sync.run(0)
    assert run.engines.restarts.used == 0


def test_all_engines_are_asked_at_the_same_time(make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = make("separate", count=2), threading.Barrier(2)
    monkeypatch.setattr(EngineInstance, "is_alive", lambda instance: asked.wait(30) >= 0)
    assert not run.engines.find_dead(EngineError("refused"))


def test_restarts_count_within_an_hour(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, rejects: Rejects
) -> None:
    now = [0.0]
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: now[0]))
    run = make("separate", restarts=1, count=1)
    for hours in (0.0, 1.001):
        now[0] = 3600 * hours
        run.engines.all[-1].die()
        assert run.engines.find_dead(EngineError("killed"))
        run.sync.run(0)
    now[0] += 3599
    run.engines.all[-1].die()
    with rejects(EngineError, "engine"):
        run.sync.run(0)


def test_a_replacement_serves_only_with_the_current_weights(make: Callable[..., Run]) -> None:
    run = make("separate", count=2)
    run.sync.run(0)
    lost, kept = run.engines.serving
    run.engines.all[0].die()
    assert run.engines.find_dead(EngineError("killed"), [lost])
    assert run.engines.find_dead(EngineError("killed"), [lost])  # as another thread may
    run.engines.replace_dead()
    assert run.engines.serving == [kept] and not run.engines.dead
    run.engines.admit()
    again, other = run.engines.serving
    assert again is not lost and again.index == lost.index and other is kept


# ------------------------------------------------------------------------------------------------------------ requests
class Client:
    """Requests under way, by name."""

    def __init__(self, engines: PlayedEngines) -> None:
        self.engines = engines
        self.resent: list[str] = []
        self.waiting: dict[str, Future[list[Generation]]] = {}

    def submit(self, names: Sequence[str]) -> None:
        """Make the requests together."""

        async def begin() -> list["asyncio.Task[list[Generation]]"]:
            return [
                asyncio.create_task(self.engines.generate(request(name), lambda name=name: self.resent.append(name)))  # type: ignore[misc]
                for name in names
            ]

        async def join(task: "asyncio.Task[list[Generation]]") -> list[Generation]:
            return await task

        tasks = self.engines.thread.run(begin())
        self.waiting |= {name: self.engines.thread.start(join(task)) for name, task in zip(names, tasks, strict=True)}

    def answered(self) -> list[str]:
        """Return the names of the requests that have been answered since, once nothing happens any more."""
        self.engines.thread.run(asyncio.sleep(0.02))
        names = sorted(name for name, future in self.waiting.items() if future.done())
        for name in names:
            assert self.waiting.pop(name).result() == ANSWER
        return names


def started(engines_of: Callable[..., PlayedEngines], names: str, count: int = 1, capacity: int = 2) -> Client:
    """Return a client that has sent these requests, as far as there is room, to engines that have not answered."""
    client = Client(engines_of(count, capacity))
    client.submit(names)
    assert client.answered() == []
    return client


def loads(engines: PlayedEngines) -> list[int]:
    return [each.tokens for each in engines.serving]


def test_requests_wait_for_room_and_go_to_the_least_loaded_engine(engines_of: Callable[..., PlayedEngines]) -> None:
    """Those that are sent together are a batch."""
    client = started(engines_of, "abcdefg", count=2, capacity=3)
    first, second = client.engines.all
    assert [first.has, second.has] == [["a", "c", "e"], ["b", "d", "f"]]
    assert loads(client.engines) == [3 * (2 + 8)] * 2
    second.end("b", "f")
    assert client.answered() == [*"bf"] and second.has == ["d", "g"]
    assert second.batches == [*(RequestBatch("b", 3, place) for place in range(3)), RequestBatch("g", 1, 0)]
    for engine in (first, second):
        engine.end(*engine.has)
    assert client.answered() == [*"acdeg"] and loads(client.engines) == [0, 0]


def test_requests_of_a_dead_engine_go_to_another_one(engines_of: Callable[..., PlayedEngines]) -> None:
    """Its earlier answers count."""
    client = started(engines_of, "abcdef", count=2, capacity=3)
    dead, other = client.engines.all
    dead.end("a")
    dead.die()
    assert client.answered() == [*"a"] and sorted(client.resent) == ["c", "e"]
    other.end("b", "d", "f")
    assert client.answered() == [*"bdf"] and sorted(other.has) == ["c", "e"]
    other.end("c", "e")
    assert client.answered() == [*"ce"] and loads(client.engines) == [0]


@pytest.mark.parametrize(
    ("alive", "error"), [(True, EngineError("too long a prompt")), (False, RewardError("the environment is broken"))]
)
def test_other_failures_than_a_death_are_raised(
    engines_of: Callable[..., PlayedEngines], alive: bool, error: SlimeLikeError, rejects: Rejects
) -> None:
    client = started(engines_of, "a")
    (engine,) = client.engines.all
    engine.alive = alive
    engine.end("a", error=error)
    with rejects(type(error), error.code):
        client.answered()


def test_answers_that_come_together_wake_the_loop_once(
    engines_of: Callable[..., PlayedEngines], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does sending: a step of many groups must not pay for each."""
    names = [f"request {number}" for number in range(64)]
    client = Client(engines_of(capacity=64))
    loop, (engine,) = client.engines.thread.loop, client.engines.all
    sends, wakes = Mock(wraps=client.engines._dispatcher.send), Mock(wraps=loop.call_soon_threadsafe)
    monkeypatch.setattr(client.engines._dispatcher, "send", sends)
    client.submit(names)
    assert client.answered() == [] and engine.has == names and sends.call_count == 1
    monkeypatch.setattr(loop, "call_soon_threadsafe", wakes)
    busy, may_run = threading.Event(), threading.Event()

    def block() -> None:
        busy.set()
        may_run.wait(30)

    loop.call_soon_threadsafe(block)
    assert busy.wait(30)
    wakes.reset_mock()
    engine.end(*names)
    assert wakes.call_count == 1
    monkeypatch.undo()
    may_run.set()
    assert client.answered() == sorted(names)


def test_a_request_that_cannot_be_sent_fails(engines_of: Callable[..., PlayedEngines]) -> None:
    engines = engines_of()
    engines.all[0].before_call = Mock(side_effect=OSError("Ray has ended"))
    with pytest.raises(OSError, match="Ray has ended"):
        engines.generate_all([request("a")])


def test_without_an_engine_requests_wait_until_there_is_one(engines_of: Callable[..., PlayedEngines]) -> None:
    """Without a source of weights, a replacement serves immediately."""
    client = started(engines_of, "ab")
    client.engines.all[0].die()
    assert client.answered() == [] and sorted(client.resent) == ["a", "b"] and client.engines.dead
    client.engines.check()
    assert client.answered() == [*"ab"] and len(client.engines.serving) == 1
    assert list(client.engines.all[-1].calls) == ["a", "b"]


def test_aborted_requests_are_canceled_and_never_answered(engines_of: Callable[..., PlayedEngines]) -> None:
    client = started(engines_of, "abc")
    (engine,) = client.engines.all
    for future in client.waiting.values():
        future.cancel()
    client.waiting.clear()
    assert client.answered() == [] and loads(client.engines) == [0]
    assert [call.is_cancelled for call in engine.calls.values()] == [True, True]
    client.submit("d")
    assert client.answered() == []
    engine.end("a", "b", "d")
    assert client.answered() == [*"d"] and list(engine.calls) == ["a", "b", "d"]


def test_silence_is_bounded(engines_of: Callable[..., PlayedEngines], rejects: Rejects) -> None:
    """An engine that hangs, neither answers nor fails, is replaced after the bound. Others' answers do not count."""
    client = started(engines_of, "abcd", count=2)
    hangs, other = client.engines.all
    client.engines.check()
    client.engines.instances[0].last_answer = time.monotonic() - client.engines._config.silence_s - 61
    with rejects(EngineError, "engines-silent"):
        client.engines.check()
    client.engines.admit()  # a weight sync, in which a replacement took that long
    client.engines.check()
    client.engines.instances[0].last_answer = time.monotonic() - client.engines._config.silence_s - 61
    other.end("b")
    assert client.answered() == ["b"]
    hangs.die(hangs=True)
    client.engines.check()
    assert client.answered() == [] and sorted(client.resent) == ["a", "c"]
    other.end("d")
    assert client.answered() == ["d"] and sorted(other.has) == ["a", "c"]
    other.end("a", "c")
    assert client.answered() == [*"ac"]


@pytest.mark.parametrize("dies", [False, True])
def test_an_evaluation_replaces_its_only_engine(engines_of: Callable[..., PlayedEngines], dies: bool) -> None:
    engines, counts = engines_of(), list[int]()
    engines.all[0].answers_all, engines.all[0].alive = True, not dies
    assert engines.generate_all([request(name) for name in "abc"], counts.append) == [ANSWER] * 3
    assert counts == sorted(counts) and counts[-1] == 3 and engines.restarts.used == dies
