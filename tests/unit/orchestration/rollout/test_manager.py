"""Requests through engines that are played: who is sent what, who is asked, and what becomes of a dead one's."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from slime_like.config import RunConfig
from slime_like.errors import EngineError, RewardError, SlimeLikeError
from slime_like.interfaces import Generation, GenerationRequest, SamplingParams
from slime_like.orchestration.rollout import manager as manager_module
from slime_like.orchestration.rollout.engine_actor import Answer, Mailbox
from slime_like.orchestration.rollout.manager import EngineClient, NoEngineLeft, RolloutManager
from slime_like.orchestration.rollout.routing import LeastLoaded
from tests.support.rejections import Rejects


def request(name: str) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_tokens=(5, 6), sampling=SamplingParams(max_new_tokens=8))


def _remote(method: Callable[..., Any]) -> Any:
    return SimpleNamespace(remote=method)


class Engine:
    """Stands for the actor of an engine; its methods' ``remote`` is called as Ray's.

    Attributes:
        has: what it was sent and has not answered.
        calls: names of the calls.
    """

    def __init__(self, answers_all: bool = False) -> None:
        self.has: list[str] = []
        self.calls: list[str] = []
        self.aborted: list[str] = []
        self.alive = True
        self.lost = False
        self.ready: list[Answer] = []
        self._answers_all = answers_all
        self._asked = False
        self.submit, self.answers, self.abort = map(_remote, (self._submit, self._ask, self.aborted.append))

    def ends(self, *names: str, error: SlimeLikeError | None = None) -> None:
        """It answers these."""
        sampled = Generation(np.array([7]), np.zeros(1, np.float32), np.array([0]), "stop")
        for name in names:
            self.has.remove(name)
            self.ready.append(Answer(name, [] if error else [sampled], error))

    def take(self) -> list[Answer]:
        self._asked = False
        if not self.alive and not self.ready:
            raise EngineError("the engine died")
        found, self.ready = self.ready, []
        return found

    def _submit(self, client: str, requests: Sequence[GenerationRequest]) -> None:
        self.calls.append("submit")
        self.has += [request.request_id for request in requests]
        if self._answers_all and self.alive:
            self.ends(*self.has)

    def _ask(self, client: str) -> "Engine":
        assert not self._asked, "asked twice"
        self._asked = True
        self.calls.append("ask")
        return self


class Supervisor:
    """As an ``EngineSupervisor`` and its ``EngineGroup``."""

    last_death = "all have died"

    def __init__(self, *engines: Engine) -> None:
        self.all = list(engines)
        self.engines = self

    @property
    def serving(self) -> list[int]:
        return [number for number, engine in enumerate(self.all) if not engine.lost]

    def actor(self, number: int) -> Engine:
        return self.all[number]

    def name(self, number: int) -> str:
        return f"engine {number}"

    def wait(self, references: Sequence[Engine], timeout_s: float) -> list[Engine]:
        return [engine for engine in references if engine.ready or not engine.alive]

    def lose(self, number: int, error: EngineError) -> bool:
        self.all[number].lost = not self.all[number].alive
        return self.all[number].lost

    def revive(self) -> None:
        assert not self.serving
        self.all.append(Engine(answers_all=True))


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "one", lambda engine, name, **_: engine.take())


def manager_of(*engines: Engine, capacity: int = 2) -> RolloutManager:
    config = RunConfig(run_dir="unused", model={"path": "unused"}, rollout={"max_concurrent_requests": capacity})
    return RolloutManager(config, cast(Any, Supervisor(*engines)))


def started(names: str, engines: int = 1, capacity: int = 2) -> tuple[EngineClient, list[Engine]]:
    """A client that has sent these requests, as far as there is room, and engines that have not answered."""
    manager = manager_of(*[Engine() for _ in range(engines)], capacity=capacity)
    client = manager.client()
    for name in names:
        client.submit(request(name))
    assert answered(client) == [] and len(client) == len(names)
    return client, cast(Any, manager.supervisor).all


def answered(client: EngineClient) -> list[str]:
    return [request.request_id for request, generations in client.poll(0.0) if generations]


def test_least_outstanding_tokens_wins() -> None:
    """A released worker is attractive again; the late release of one that left is harmless."""
    pool = LeastLoaded(capacity=3)
    for worker in range(3):
        pool.join(worker)
    assert [pool.acquire(tokens) for tokens in (100, 10, 50, 5)] == [0, 1, 2, 1]
    pool.release(0, 100)
    assert pool.acquire(1) == 0
    pool.leave(0)
    pool.release(0, 1)
    assert [pool.acquire(1) for _ in range(4)] == [1, 2, 2, None]


def test_an_engine_is_called_once_for_all_that_it_is_sent() -> None:
    client, engines = started("abcdefg", engines=2, capacity=3)
    assert [engine.has for engine in engines] == [["a", "c", "e"], ["b", "d", "f"]]
    assert [engine.calls for engine in engines] == [["submit", "ask"]] * 2
    loads = client._manager._registry
    assert [loads.outstanding_tokens(number) for number in (0, 1)] == [3 * (2 + 8)] * 2
    engines[1].ends("b", "f")
    assert answered(client) == ["b", "f"] and len(client) == 5
    assert answered(client) == [] and engines[1].has == ["d", "g"]
    for engine in engines:
        engine.ends(*engine.has)
    assert sorted(answered(client)) == ["a", "c", "d", "e", "g"] and len(client) == 0
    assert [loads.outstanding_tokens(number) for number in (0, 1)] == [0, 0]
    calls = [len(engine.calls) for engine in engines]
    assert answered(client) == [] and [len(engine.calls) for engine in engines] == calls


def test_what_a_dead_engine_had_goes_to_another_one() -> None:
    """So does a request that failed with it; what it had answered counts."""
    client, (dead, other) = started("abcdef", engines=2, capacity=3)
    dead.ends("a")
    dead.ends("c", error=EngineError("its process died"))
    dead.alive = False
    assert answered(client) == ["a"]
    assert client.resent == ["c", "e"] and len(client) == 5
    other.ends("b", "d", "f")
    assert answered(client) == ["b", "d", "f"]
    client.poll(0.0)
    other.ends("c", "e")
    assert answered(client) == ["c", "e"] and len(client) == 0


@pytest.mark.parametrize(
    ("alive", "error"), [(True, EngineError("too long a prompt")), (False, RewardError("the environment is broken"))]
)
def test_what_is_not_a_death_is_raised(alive: bool, error: SlimeLikeError, rejects: Rejects) -> None:
    client, (engine,) = started("a")
    engine.alive = alive
    engine.ends("a", error=error)
    with rejects(type(error), error.code):
        client.poll(0.0)


def test_without_an_engine_requests_stay_until_there_is_one(rejects: Rejects) -> None:
    client, engines = started("ab")
    engines[0].alive = False
    assert answered(client) == [] and client.resent == ["a", "b"]
    for _ in range(2):
        with rejects(NoEngineLeft, "no-engine"):
            client.poll(0.0)
    engines.append(Engine())
    client.poll(0.0)
    assert engines[1].has == ["a", "b"]


def test_the_aborted_are_never_answered() -> None:
    client, (engine,) = started("abc")
    client.abort({"a", "c"})
    assert engine.aborted == ["a"] and len(client) == 2
    engine.ends("a", error=EngineError("aborted"))
    engine.ends("b")
    assert answered(client) == ["b"] and len(client) == 0


def test_silence_is_bounded(rejects: Rejects) -> None:
    client, _ = started("a")
    client._manager.silence_s = 0.0
    with rejects(EngineError, "engines-silent"):
        client.poll(0.0)


def test_an_engine_that_hangs_is_replaced_after_the_bound() -> None:
    """It neither answers nor fails; what it had goes to the others."""
    client, (hangs, other) = started("abcd", engines=2)
    cast(Any, client._supervisor).wait = lambda references, timeout_s: [engine for engine in references if engine.ready]
    hangs.alive = False
    assert answered(client) == [] and client.resent == []
    client._manager.silence_s = 0.0
    assert answered(client) == [] and client.resent == ["a", "c"]
    client._manager.silence_s = 60.0
    other.ends("b", "d")
    assert answered(client) == ["b", "d"]
    client.poll(0.0)
    assert other.has == ["a", "c"]
    other.ends("a", "c")
    assert answered(client) == ["a", "c"] and len(client) == 0


@pytest.mark.parametrize("dies", [False, True])
def test_an_evaluation_whose_only_engine_dies_has_it_replaced(dies: bool) -> None:
    engine = Engine(answers_all=True)
    engine.alive = not dies
    counts: list[int] = []
    answers = manager_of(engine).generate([request(name) for name in "abc"], counts.append)
    assert counts == sorted(counts) and counts[-1] == 3
    assert [[generation.token_ids.tolist() for generation in each] for each in answers] == [[[7]]] * 3


def test_answers_that_come_together_are_taken_together() -> None:
    async def run() -> tuple[list[str], list[str], int]:
        mailbox = Mailbox()
        mailbox.expected = 3
        waiting = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.put_nowait(Answer("a"))
        await asyncio.sleep(0)
        mailbox.put_nowait(Answer("b"))
        first = await waiting
        mailbox.put_nowait(Answer("c"))
        return [a.request_id for a in first], [a.request_id for a in await mailbox.take()], mailbox.expected

    assert asyncio.run(run()) == (["a", "b"], ["c"], 0)
