"""Engines that die at any call: the restart budget, the weights that a replacement serves, and device memory."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from slime_like.checks.engines import chosen_transport
from slime_like.config import RunConfig
from slime_like.errors import EngineError
from slime_like.interfaces import BucketMetadata, Manifest, UpdateReceipt
from slime_like.orchestration.rollout.colocation import Turns
from slime_like.orchestration.rollout.supervisor import EngineSupervisor
from slime_like.orchestration.rollout.sync_probe import Probe
from slime_like.orchestration.weight_sync import WeightSync
from tests.support.pending import Later, OneRank
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import write_checkpoint

STEPS = 2


@dataclass
class Engine:
    """One start of one engine. It serves a version, except during an update."""

    alive: bool = True
    memory: set[str] = field(default_factory=lambda: {"weights", "kv_cache"})
    joined: bool = False
    version: int | None = 0


class Engines:
    """An ``EngineGroup``. Engine 0 dies right before its call number ``dies_at``."""

    def __init__(self, shared: bool, count: int = 1, dies_at: int | None = None) -> None:
        self.all = [Engine() for _ in range(count)]
        self.trainers: set[str] = set()  # parts on the device
        self._shared = shared
        self.calls = 0
        self._dies_at = dies_at

    def __len__(self) -> int:
        return len(self.all)

    def name(self, index: int) -> str:
        return f"engine {index}"

    def actor(self, index: int) -> Engine:
        return self.all[index]

    def start(self, left: Callable[[Sequence[str]], None]) -> None: ...

    def restart_engines(self, indexes: Sequence[int]) -> None:
        for index in indexes:
            assert not self.all[index].alive
            self.all[index] = Engine()
        self.look()

    @staticmethod
    def is_alive(actor: Engine) -> bool:
        return actor.alive

    def look(self) -> None:
        """No shared device ever holds optimizer state and KV cache at the same time."""
        if self._shared and "state" in self.trainers:
            assert not any(engine.alive and "kv_cache" in engine.memory for engine in self.all)

    def _touch(self, index: int) -> Engine:
        if index == 0:
            self.calls += 1
            if self.calls == self._dies_at:
                self.all[0].alive = False
        if not self.all[index].alive:
            raise EngineError(f"engine {index} died")
        return self.all[index]

    def ask(self, method: str, *arguments: Any, phase: str, indexes: Iterable[int]) -> Later[None]:
        (index,) = indexes
        return Later(lambda: self._sleep_or_wake(index, method, *arguments))

    def _sleep_or_wake(self, index: int, method: str, argument: Any) -> None:
        memory = self._touch(index).memory
        if method == "sleep":
            if not argument and "weights" in memory:
                self.all[index].version = None
            memory.clear()
        else:
            assert not memory & set(argument), "it is already there"
            memory.update(argument)
        self.look()

    def generate(self) -> None:
        for index in range(len(self)):
            engine = self._touch(index)
            assert engine.memory == {"weights", "kv_cache"} and not (self._shared and self.trainers)

    def require_trainers(self) -> None:
        """Check that engines hold nothing on shared devices."""
        if self._shared:
            assert self.trainers == {"weights", "state"}
            assert not any(engine.alive and engine.memory for engine in self.all)

    # ------------------------------------------------------------------------------------------------------ weights
    def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        for index in range(len(self)):
            self._touch(index).joined = True

    def begin_update(self, version: int, manifests: Later[list[Manifest]]) -> Later[None]:
        manifests.result()
        for index in range(len(self)):
            engine = self._touch(index)
            assert engine.joined and "weights" in engine.memory and "weights" in self.trainers
            assert not self._shared or engine.memory == self.trainers == {"weights"}
            engine.version = None
        return Later(lambda: None)

    def update(self, buckets: list[BucketMetadata], before: Any) -> Any:
        return SimpleNamespace(result=lambda: [self._touch(index) for index in range(len(self))])

    def finish_update(self, version: int, before: Any) -> Later[list[UpdateReceipt]]:
        before.result()
        for index in range(len(self)):
            self._touch(index).version = version
        return Later(lambda: [UpdateReceipt(version, {}) for _ in self.all])


class Trainers(OneRank):
    """A trainer group of one rank that sends one bucket."""

    def __init__(self, engines: Engines) -> None:
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


@dataclass
class Run:
    """A loop of two steps without training."""

    engines: Engines
    supervisor: EngineSupervisor
    turns: Turns
    sync: WeightSync
    notes: list[str]

    def sample(self) -> None:
        """Sample like ``EngineClient``, also when an engine does not answer."""
        self.turns.generation()
        self.turns.generation()  # an evaluation
        while True:
            if not (serving := self.supervisor.serving):
                self.supervisor.revive()
                continue
            engines = [cast(Engine, start.actor) for start in serving]
            assert all(engine.version == self.version for engine in engines if engine.alive)
            try:
                self.engines.generate()
            except EngineError as error:
                lost = [start for start in serving if not start.actor.alive]
                if not all(self.supervisor.lose(start, error) for start in lost):
                    raise
            if self.supervisor.serving:
                return  # the remaining engines have answered everything

    def go(self) -> None:
        self.version = 0
        self.sync.run(0)
        for step in range(1, STEPS + 1):
            self.sample()
            self.turns.training()
            self.turns.training()  # a checkpoint
            self.engines.require_trainers()
            self.sync.run(step)
            self.version = step
            if step == 1:
                self.turns.training(keep_weights=True)  # a checkpoint, then sampling
                self.engines.require_trainers()


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Run]:
    write_checkpoint(tmp_path / "model")

    def run(placement: str = "colocated", restarts: int = 2, **engines: Any) -> Run:
        config = RunConfig(
            run_dir=tmp_path, model={"path": tmp_path / "model"}, steps=STEPS, sync={"verify": False},
            cluster={"placement": placement},
            rollout={"num_engines": engines.get("count", 1), "max_engine_restarts": restarts},
        )  # fmt: skip
        group, notes = Engines(placement == "colocated", **engines), list[str]()
        trainers: Any = Trainers(group)
        supervisor = EngineSupervisor(cast(Any, group), config.rollout, notes.append)
        supervisor.start()
        turns = Turns()
        if placement == "colocated":
            supervisor.sleep(keep_weights=False)
            turns = Turns((trainers, supervisor))
        trainers.onload()
        transport, probe = chosen_transport(config, on_cuda=False, num_hosts=1), Probe(config.model, None, 32, ())
        sync = WeightSync(config.sync, transport, config.model.dtype, probe, trainers, supervisor, turns, "run")
        sync.connect()
        return Run(group, supervisor, turns, sync, notes)

    return run


def calls_of(make: Callable[..., Run], placement: str, count: int) -> int:
    run = make(placement, count=count)
    before = run.engines.calls
    run.go()
    return run.engines.calls - before


@pytest.mark.parametrize("placement", ["separate", "colocated"])
@pytest.mark.parametrize("count", [1, 2])
def test_an_engine_may_die_at_any_call(make: Callable[..., Run], placement: str, count: int) -> None:
    """A death costs one restart. In the end, every engine serves the last version."""
    first = make(placement, count=count).engines.calls + 1
    last = first + calls_of(make, placement, count)
    assert last - first >= 3 * 3 + STEPS  # three calls of three syncs, and the sampling of every step
    for dies_at in range(first, last):
        run = make(placement, count=count, dies_at=dies_at)
        run.go()
        run.sample()  # finds a death at the very last call, which the next sync repairs
        run.sync.run(STEPS)
        assert run.supervisor.generation == 1, dies_at
        assert [note.startswith("engine 0 was restarted (") for note in run.notes] == [True]
        assert len(run.supervisor.serving) == count
        assert all(engine.alive and engine.version == STEPS for engine in run.engines.all)


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_without_a_restart_left_the_first_death_ends_the_run(
    make: Callable[..., Run], placement: str, rejects: Rejects
) -> None:
    first = make(placement).engines.calls + 1
    for dies_at in range(first, first + calls_of(make, placement, 1)):
        with rejects(EngineError, "engine"):
            make(placement, restarts=0, dies_at=dies_at).go()


def test_deaths_beyond_the_budget_replace_nothing(make: Callable[..., Run], rejects: Rejects) -> None:
    run = make("separate", restarts=1, count=2)
    for engine in run.engines.all:
        engine.alive = False
    assert not run.supervisor.find_dead(EngineError("both died"))
    with rejects(EngineError, "engine"):
        run.sync.run(0)


def test_a_failure_of_a_living_engine_is_raised(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, rejects: Rejects
) -> None:
    run = make("colocated", count=2)
    assert not run.supervisor.lose(run.supervisor.serving[0], EngineError("refused"))
    assert len(run.supervisor.serving) == 2
    monkeypatch.setattr(run.engines, "_sleep_or_wake", Mock(side_effect=EngineError("engine 1 has no memory left")))
    with rejects(EngineError, "engine"):
        run.supervisor.sleep(keep_weights=True)


def test_a_replacement_serves_only_with_the_current_weights(make: Callable[..., Run]) -> None:
    run = make("separate", count=2)
    run.sync.run(0)
    lost, kept = run.supervisor.serving
    run.engines.all[0].alive = False
    assert run.supervisor.lose(lost, EngineError("killed"))
    assert run.supervisor.lose(lost, EngineError("killed"))  # as another thread may
    run.supervisor.replace_dead()
    assert run.supervisor.serving == [kept]
    assert not run.supervisor.has_dead
    run.supervisor.admit()
    again, other = run.supervisor.serving
    assert again is not lost and again.index == lost.index and other is kept


def test_without_a_weight_source_a_replacement_serves_immediately(make: Callable[..., Run]) -> None:
    run = make("separate")
    run.supervisor.replace_and_sync = None
    run.engines.all[0].alive = False
    assert run.supervisor.lose(run.supervisor.serving[0], EngineError("killed"))
    run.supervisor.revive()
    assert run.engines.all[0].alive and len(run.supervisor.serving) == 1
