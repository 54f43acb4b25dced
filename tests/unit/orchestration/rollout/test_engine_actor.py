"""The actor of an engine: its nodes are whole or dead, and its requests outlive weight updates."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_like.config import RunConfig
from slime_like.errors import EngineError, WeightSyncError
from slime_like.interfaces import (
    ConversationTask,
    GenerationRequest,
    Manifest,
    PromptInput,
    RequestBatch,
    SamplingParams,
)
from slime_like.interfaces.engine import WHOLE, EngineHealth, EngineNode
from slime_like.orchestration.rollout import engine_actor
from slime_like.orchestration.rollout.engine_actor import EngineActor, EngineNodeOptions, UpdateGate
from tests.support.rejections import Rejects


class _Engine:
    """An engine with processes 7 and 8, whose start waits until ``opened`` is set. ``stops`` counts."""

    def __init__(self, config: RunConfig, index: int, part: EngineNode = WHOLE) -> None:
        self.part, self.stops, self.opened = part, 0, asyncio.Event()

    async def start(self) -> None:
        await self.opened.wait()

    async def health(self) -> EngineHealth:
        return EngineHealth(False, 0, 0, 0, (7, 8))

    async def stop(self) -> None:
        self.stops += 1


Further = asyncio.Future[None]


@pytest.fixture
def actor_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a factory of actors with further nodes, whose ranks end with these futures."""

    def make(ends: list[Further], kind: type[_Engine] = _Engine) -> Any:
        waiting = list(ends)

        def new_actor(load: Any, number: int, role: str, devices: str) -> Any:
            end, stopped = waiting.pop(0), asyncio.get_running_loop().create_future()
            stopped.set_result(None)
            run, stop = (SimpleNamespace(remote=lambda *_, each=each: each) for each in (end, stopped))
            return SimpleNamespace(run=run, stop=stop, role=role, devices=devices, load=load)

        options = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=new_actor))
        monkeypatch.setattr(engine_actor, "ray", SimpleNamespace(remote=lambda _: options))
        monkeypatch.setattr(engine_actor, "_settle", lambda *_: tmp_path)
        monkeypatch.setattr(engine_actor, "node_address", lambda: "127.0.0.1")
        monkeypatch.setattr(engine_actor, "load_engine", lambda _: kind)
        config = RunConfig(run_dir=tmp_path, model={"path": tmp_path})
        return EngineActor(config, 3, "0,1", [EngineNodeOptions({}, f"{index}") for index in range(len(ends))])

    return make


def test_an_engine_ends_with_the_ranks_of_any_node(
    actor_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(engine_actor, "end_processes", lambda processes, grace_s: ended.extend(processes))

    async def scenario() -> None:
        ends = [asyncio.get_running_loop().create_future() for _ in range(2)]
        actor = actor_of(ends)
        part, engine = actor._part, actor._engine
        assert (part.number, part.count, part.host) == (0, 3, "127.0.0.1") and engine.part is part
        found = [(one.role, one.devices) for one in actor._further]
        assert found == [("engine-3-node-1", "0"), ("engine-3-node-2", "1")]
        assert actor._further[1].load("part").part == "part"
        engine.opened.set()
        await actor.start()
        assert ended == []
        ends[1].set_exception(EngineError("killed", code="engine-died"))
        await asyncio.wait_for(actor._watching, 5)
        assert ended == [7, 8]
        await actor.stop()
        assert engine.stops == 1

    asyncio.run(scenario())


def test_a_start_fails_with_the_reason_of_a_further_node(actor_of: Callable[..., Any], rejects: Rejects) -> None:
    async def scenario() -> None:
        end = asyncio.get_running_loop().create_future()
        actor = actor_of([end])
        starting = asyncio.ensure_future(actor.start())
        await asyncio.sleep(0)
        end.set_exception(EngineError("no such argument", code="engine-arguments"))
        with rejects(EngineError, "engine-part-ended") as caught:
            await asyncio.wait_for(starting, 5)
        assert "engine 3" in str(caught.value) and "no such argument" in str(caught.value)
        await actor.stop()

    asyncio.run(scenario())


def test_a_greedy_response_follows_the_samples(actor_of: Callable[..., Any]) -> None:
    """Engines and conversations get it as one more request, which need not return what training needs."""
    asked: list[GenerationRequest] = []

    async def run(request: GenerationRequest) -> list[str]:
        asked.append(request)
        await asyncio.sleep(0.01 if request.num_samples > 1 else 0)  # the greedy one is ready first
        return [f"{request.request_id}/{sample}" for sample in range(request.num_samples)]

    async def scenario() -> None:
        actor = actor_of([])
        actor._engine.generate = run
        actor._conversations = SimpleNamespace(run=run)
        sampling = SamplingParams(temperature=0.7, top_p=0.5, top_k=8, min_p=0.1, max_new_tokens=9, stop=("x",))
        request = GenerationRequest("train-3", PromptInput([1]), sampling, num_samples=2, seed=5, greedy=True)
        request = replace(request, batch=RequestBatch("train-2", 3, 1))
        for task in (None, ConversationTask("42")):
            asked.clear()
            found = await actor.generate(replace(request, task=task))
            assert found == ["train-3/0", "train-3/1", "train-3-greedy/0"]
            greedy = SamplingParams(temperature=0.0, max_new_tokens=9, stop=("x",), training=False)
            assert [each.sampling for each in asked] == [sampling, greedy]
            assert [each.task for each in asked] == [task, task] and not any(each.greedy for each in asked)
            assert [each.batch for each in asked] == [RequestBatch("train-2", 6, place) for place in (2, 3)]

    asyncio.run(scenario())


class _Served(_Engine):
    """An engine that refuses requests while its weights are mixed, and freezes running ones during an update."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.is_whole, self.peer_dies, self.may_answer = True, False, asyncio.Event()

    async def generate(self, request: GenerationRequest) -> list[str]:
        if not self.is_whole:
            raise EngineError("a part of an update is missing", code="mixed-weights")
        await self.may_answer.wait()
        return [request.request_id]

    async def begin_update(self, version: int, manifest: object) -> None:
        self.is_whole = False

    async def update(self, bucket: object) -> None:
        if self.peer_dies:
            raise WeightSyncError("a peer of the collective is gone", code="sync-call-failed")

    async def finish_update(self, version: int) -> str:
        self.is_whole = True
        return "receipt"


@pytest.fixture
def served(actor_of: Callable[..., Any]) -> Callable[[float], Any]:
    """Return a factory of actors with a time limit for requests."""

    def make(limit_s: float) -> Any:
        actor = actor_of([], _Served)
        actor._gate = UpdateGate(limit_s)
        return actor

    return make


def ask(actor: Any, name: str) -> "asyncio.Task[list[str]]":
    return asyncio.ensure_future(actor.generate(GenerationRequest(name, PromptInput([1]), SamplingParams())))


def test_requests_wait_until_a_failed_update_is_repeated(served: Callable[[float], Any]) -> None:
    """Another engine's death may fail this one's update. The driver replaces the other, and sends everything again."""

    async def scenario() -> None:
        actor = served(60)
        actor._engine.may_answer.set()
        await actor.begin_update(1, Manifest({}))
        actor._engine.peer_dies = True
        asked = [ask(actor, "during")]
        with pytest.raises(WeightSyncError):
            await actor.update([object()])
        asked.append(ask(actor, "after"))
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in asked)
        actor._engine.peer_dies = False
        await actor.begin_update(1, Manifest({}))
        await actor.update([object()])
        assert await actor.finish_update(1) == "receipt"
        assert await asyncio.gather(*asked) == [["during"], ["after"]]

    asyncio.run(scenario())


def test_the_clock_of_a_request_stands_still_during_updates(served: Callable[[float], Any], rejects: Rejects) -> None:
    async def scenario() -> None:
        actor = served(0.1)
        frozen = ask(actor, "frozen")
        await asyncio.sleep(0)
        await actor.begin_update(1, Manifest({}))
        arrived = ask(actor, "arrived")
        await asyncio.sleep(0.2)  # another engine is replaced
        await actor.begin_update(1, Manifest({}))
        await actor.finish_update(1)
        await asyncio.sleep(0.01)
        assert not frozen.done() and not arrived.done()
        late = asyncio.get_running_loop().time()
        for task in (frozen, arrived):
            with rejects(EngineError, "request-timeout"):
                await task
        assert asyncio.get_running_loop().time() - late < 1
        quick = ask(actor, "quick")
        actor._engine.may_answer.set()
        assert await quick == ["quick"] and not actor._gate._left

    asyncio.run(scenario())
