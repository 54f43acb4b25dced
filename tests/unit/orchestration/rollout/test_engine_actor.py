"""An engine that spans nodes is whole or dead: fake actors of further nodes, and an engine that only counts."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_like.config import RunConfig
from slime_like.errors import EngineError
from slime_like.interfaces import ConversationTask, GenerationRequest, PromptInput, RequestBatch, SamplingParams
from slime_like.interfaces.engine import WHOLE, EngineHealth, EngineNode
from slime_like.orchestration.rollout import engine_actor
from slime_like.orchestration.rollout.engine_actor import EngineActor, EngineNodeOptions
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
def actor_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Further]], Any]:
    """Return a factory of actors with further nodes, whose ranks end with these futures."""

    def make(ends: list[Further]) -> Any:
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
        monkeypatch.setattr(engine_actor, "load_engine", lambda _: _Engine)
        config = RunConfig(run_dir=tmp_path, model={"path": tmp_path})
        return EngineActor(config, 3, "0,1", [EngineNodeOptions({}, f"{index}") for index in range(len(ends))])

    return make


def test_an_engine_ends_with_the_ranks_of_any_node(
    actor_of: Callable[[list[Further]], Any], monkeypatch: pytest.MonkeyPatch
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


def test_a_start_fails_with_the_reason_of_a_further_node(
    actor_of: Callable[[list[Further]], Any], rejects: Rejects
) -> None:
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


def test_a_greedy_response_follows_the_samples(actor_of: Callable[[list[Further]], Any]) -> None:
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
