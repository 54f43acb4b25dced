"""Requests through played engines: which engine gets them, and where a dead engine's requests go."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from slime_like.config.rollout import RolloutConfig
from slime_like.errors import EngineError, RewardError, SlimeLikeError
from slime_like.interfaces import Generation, GenerationRequest, PromptInput, RequestBatch, SamplingParams
from slime_like.orchestration.rollout import engine_client
from slime_like.orchestration.rollout.engine_client import EngineCall, EngineClient
from slime_like.orchestration.rollout.supervisor import EngineSupervisor, NoEngineLeft
from tests.support.rejections import Rejects


def request(name: str) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt=PromptInput([5, 6]), sampling=SamplingParams(max_new_tokens=8))


class Call:
    """Ray's reference to the answer to one request."""

    def __init__(self, engine: "Engine", name: str) -> None:
        self.engine, self.name = engine, name
        self.is_ready = self.is_cancelled = False
        self.error: SlimeLikeError | None = None

    def result(self) -> list[Generation]:
        if self.error is not None:
            raise self.error
        if not self.is_ready:
            raise EngineError("the engine died")
        return [Generation(np.array([7]), np.zeros(1, np.float32), np.array([0]), "stop")]


class Engine:
    """An engine's actor. Its ``generate.remote`` is called like Ray's.

    Attributes:
        calls: calls by the name of their request, in order.
        batches: the batch of each.
    """

    def __init__(self, answers_all: bool = False) -> None:
        self.calls: dict[str, Call] = {}
        self.batches: list[RequestBatch | None] = []
        self.alive = True
        self.generate = SimpleNamespace(remote=self._generate)
        self._answers_all = answers_all

    @property
    def has(self) -> list[str]:
        return [name for name, call in self.calls.items() if not call.is_ready]

    def ends(self, *names: str, error: SlimeLikeError | None = None) -> None:
        for name in names:
            self.calls[name].is_ready, self.calls[name].error = True, error

    def _generate(self, request: GenerationRequest) -> Call:
        call = self.calls[request.request_id] = Call(self, request.request_id)
        self.batches.append(request.batch)
        call.is_ready = self._answers_all and self.alive
        return call


class Engines:
    """An ``EngineGroup``."""

    silence_s = 60.0

    def __init__(self, *engines: Engine) -> None:
        self.all = list(engines)

    def __len__(self) -> int:
        return len(self.all)

    def actor(self, index: int) -> Engine:
        return self.all[index]

    def name(self, index: int) -> str:
        return f"engine {index}"

    def start(self, left: Callable[[Sequence[str]], None]) -> None: ...

    def restart_engines(self, indexes: Sequence[int]) -> None:
        for index in indexes:
            self.all[index] = Engine(answers_all=True)

    @staticmethod
    def is_alive(actor: Engine) -> bool:
        return actor.alive

    def wait(self, references: Sequence[Call], timeout_s: float) -> list[Call]:
        return [call for call in references if call.is_ready or not call.engine.alive]

    @staticmethod
    def cancel(reference: Call) -> None:
        reference.is_cancelled = True


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "one", lambda call, name, **_: call.result())


class Client(EngineClient):
    """A client with its unanswered calls, whose tags are the names of their requests."""

    def __init__(self, supervisor: EngineSupervisor) -> None:
        super().__init__(supervisor)
        self.calls: list[EngineCall] = []
        self.resent: list[str] = []

    def __len__(self) -> int:
        return len(self.calls)

    def submit(self, name: str) -> None:
        self.calls.append(EngineCall(request(name)))

    def answered(self) -> list[str]:
        answers, lost = self.poll(self.calls, 0.0)
        self.resent += [call.request.request_id for call in lost]
        found = [call for call, generations in answers if generations]
        self.calls = [call for call in self.calls if call not in found]
        return [call.request.request_id for call in found]


def client_of(*engines: Engine, capacity: int = 2) -> Client:
    rollout = RolloutConfig(max_concurrent_requests=capacity, max_engine_restarts=2)
    supervisor = EngineSupervisor(cast(Any, Engines(*engines)), rollout, lambda note: None)
    supervisor.start()
    return Client(supervisor)


def started(names: str, engines: int = 1, capacity: int = 2) -> tuple[Client, list[Engine]]:
    """A client that has sent these requests, as far as there is room, and engines that have not answered."""
    group = [Engine() for _ in range(engines)]
    client = client_of(*group, capacity=capacity)
    for name in names:
        client.submit(name)
    assert client.answered() == [] and len(client) == len(names)
    return client, group


def loads(client: Client) -> list[int]:
    return [start.tokens for start in client._supervisor.serving]


def test_least_outstanding_tokens_wins() -> None:
    """A released engine is attractive again. The late release of one that died is harmless."""
    engines = [Engine() for _ in range(3)]
    supervisor = client_of(*engines, capacity=3)._supervisor

    def acquire(*tokens: int) -> list[int | None]:
        return [start and start.index for start in map(supervisor.acquire, tokens)]

    first = supervisor.serving[0]
    assert acquire(100, 10, 50, 5) == [0, 1, 2, 1]
    supervisor.release(first, 100)
    assert acquire(1) == [0]
    engines[0].alive = False
    assert supervisor.lose(first, EngineError("killed"))
    supervisor.release(first, 1)
    assert acquire(1, 1, 1, 1) == [1, 2, 2, None]


def test_requests_wait_for_room_and_answers_make_room() -> None:
    client, engines = started("abcdefg", engines=2, capacity=3)
    assert [engine.has for engine in engines] == [["a", "c", "e"], ["b", "d", "f"]]
    assert loads(client) == [3 * (2 + 8)] * 2
    engines[1].ends("b", "f")
    assert client.answered() == ["b", "f"] and len(client) == 5
    assert client.answered() == [] and engines[1].has == ["d", "g"]
    assert engines[1].batches == [*(RequestBatch("b", 3, place) for place in range(3)), RequestBatch("g", 1, 0)]
    for engine in engines:
        engine.ends(*engine.has)
    assert sorted(client.answered()) == ["a", "c", "d", "e", "g"] and len(client) == 0
    assert loads(client) == [0, 0] and client.answered() == []


def test_requests_of_a_dead_engine_go_to_another_one() -> None:
    """So does a request that failed with it. Its earlier answers count."""
    client, (dead, other) = started("abcdef", engines=2, capacity=3)
    dead.ends("a")
    dead.ends("c", error=EngineError("its process died"))
    dead.alive = False
    assert client.answered() == ["a"]
    assert client.resent == ["c", "e"] and len(client) == 5
    other.ends("b", "d", "f")
    assert client.answered() == ["b", "d", "f"]
    client.answered()
    other.ends("c", "e")
    assert client.answered() == ["c", "e"] and len(client) == 0


@pytest.mark.parametrize(
    ("alive", "error"), [(True, EngineError("too long a prompt")), (False, RewardError("the environment is broken"))]
)
def test_other_failures_than_a_death_are_raised(alive: bool, error: SlimeLikeError, rejects: Rejects) -> None:
    client, (engine,) = started("a")
    engine.alive = alive
    engine.ends("a", error=error)
    with rejects(type(error), error.code):
        client.answered()


def test_without_an_engine_requests_stay_until_there_is_one(rejects: Rejects) -> None:
    client, (engine,) = started("ab")
    engine.alive = False
    assert client.answered() == [] and client.resent == ["a", "b"]
    for _ in range(2):
        with rejects(NoEngineLeft, "no-engine"):
            client.answered()
    client._supervisor.revive()
    assert client.answered() == ["a", "b"]


def test_aborted_requests_are_canceled_and_never_answered() -> None:
    client, (engine,) = started("abc")
    client.abort(client.calls)
    client.calls.clear()
    assert [call.is_cancelled for call in engine.calls.values()] == [True, True]
    assert len(client) == 0 and loads(client) == [0]
    engine.ends("a", "b")
    client.submit("d")
    client.answered()
    engine.ends("d")
    assert client.answered() == ["d"] and list(engine.calls) == ["a", "b", "d"]


def test_silence_is_bounded(rejects: Rejects) -> None:
    client, _ = started("a")
    client._silence_s = 0.0
    with rejects(EngineError, "engines-silent"):
        client.answered()


def test_an_engine_that_hangs_is_replaced_after_the_bound() -> None:
    """It neither answers nor fails. Its requests go to the others."""
    client, (hangs, other) = started("abcd", engines=2)
    group = cast(Any, client._supervisor.engines)
    group.wait = lambda references, timeout_s: [call for call in references if call.is_ready]
    hangs.alive = False
    assert client.answered() == [] and client.resent == []
    client._silence_s = 0.0
    assert client.answered() == [] and client.resent == ["a", "c"]
    client._silence_s = 60.0
    other.ends("b", "d")
    assert client.answered() == ["b", "d"]
    client.answered()
    assert other.has == ["a", "c"]
    other.ends("a", "c")
    assert client.answered() == ["a", "c"] and len(client) == 0


@pytest.mark.parametrize("dies", [False, True])
def test_an_evaluation_replaces_its_only_engine(dies: bool) -> None:
    engine = Engine(answers_all=True)
    engine.alive = not dies
    counts: list[int] = []
    answers = client_of(engine).generate([request(name) for name in "abc"], counts.append)
    assert counts == sorted(counts) and counts[-1] == 3
    assert [[generation.token_ids.tolist() for generation in each] for each in answers] == [[[7]]] * 3
