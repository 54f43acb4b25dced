"""Requests through engines that are played: who is sent what, who is asked, and what becomes of a dead one's."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slime_like.errors import EngineError, RewardError, SlimeLikeError
from slime_like.interfaces import Generation, GenerationRequest, SamplingParams
from slime_like.orchestration.rollout.engine_actor import Mailbox
from slime_like.orchestration.rollout.engine_client import Answer, EngineClient, NoEngineLeft
from tests.support.rejections import Rejects

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=8, stop_token_ids=(2,))


def request(name: str) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_tokens=(5, 6), sampling=SAMPLING, num_samples=1, seed=0)


def generation() -> Generation:
    ones = np.ones(1)
    return Generation(ones.astype(np.int64), ones.astype(np.float32), ones.astype(np.int64), "stop")


@dataclass
class Member:
    """An engine with room for some requests.

    Attributes:
        has: what it was sent and has not answered.
        answers: what the next who waits is given.
        open: the reference of who has asked.
    """

    room: int
    has: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    open: int | None = None
    alive: bool = True
    lost: bool = False


class Pool:
    """``EnginePool``, and what it was asked for."""

    def __init__(self, *rooms: int) -> None:
        self.members = [Member(room) for room in rooms]
        self.calls: list[tuple[str, int]] = []
        self.aborted: list[str] = []
        self._references = itertools.count()

    def acquire(self, tokens: int) -> int | None:
        assert tokens == 2 + 8
        there = [number for number, member in enumerate(self.members) if not member.lost]
        if not there:
            raise NoEngineLeft("all have died")
        free = [number for number in there if self.members[number].room]
        if not free:
            return None
        chosen = max(free, key=lambda number: self.members[number].room)
        self.members[chosen].room -= 1
        return chosen

    def release(self, member: int, tokens: int) -> None:
        self.members[member].room += 1

    def send(self, member: int, client: str, requests: Sequence[GenerationRequest]) -> None:
        self.calls.append(("send", member))
        self.members[member].has += [request.request_id for request in requests]

    def ask(self, member: int, client: str) -> int:
        assert self.members[member].open is None, "asked twice"
        self.calls.append(("ask", member))
        self.members[member].open = next(self._references)
        return self.members[member].open

    def wait(self, references: Sequence[int], timeout_s: float) -> list[int]:
        return [m.open for m in self.members if m.open in references and (m.answers or not m.alive)]  # type: ignore[misc]

    def answers(self, member: int, reference: int) -> list[Answer]:
        fake = self.members[member]
        assert fake.open == reference
        fake.open = None
        if not fake.alive and not fake.answers:
            raise EngineError(f"engine {member} died")
        found, fake.answers = fake.answers, []
        return found

    def lose(self, member: int, error: EngineError) -> bool:
        self.members[member].lost = not self.members[member].alive
        return self.members[member].lost

    def abort(self, member: int, request_id: str) -> None:
        self.aborted.append(request_id)

    def describe(self, member: int) -> str:
        return f"engine {member}"

    def ends(self, member: int, *names: str, error: SlimeLikeError | None = None) -> None:
        """It answers these."""
        fake = self.members[member]
        for name in names:
            fake.has.remove(name)
            fake.answers.append(Answer(name, [] if error else [generation()], error))


def client_of(pool: Pool, names: str) -> EngineClient:
    client = EngineClient(pool, silence_s=60)
    for name in names:
        client.submit(request(name))
    return client


def answered(client: EngineClient) -> list[str]:
    return [request.request_id for request, generations in client.poll(0.0) if generations]


def test_an_engine_is_called_once_for_all_that_it_is_sent() -> None:
    pool = Pool(2, 3)
    client = client_of(pool, "abcdefg")
    assert answered(client) == [] and len(client) == 7
    assert [sorted(member.has) for member in pool.members] == [["b", "d"], ["a", "c", "e"]]
    assert sorted(pool.calls) == [("ask", 0), ("ask", 1), ("send", 0), ("send", 1)]
    pool.ends(1, "a", "e")
    assert answered(client) == ["a", "e"] and len(client) == 5
    assert answered(client) == [] and pool.members[1].has == ["c", "f", "g"]
    for number in (0, 1):
        pool.ends(number, *pool.members[number].has)
    assert sorted(answered(client)) == ["b", "c", "d", "f", "g"] and len(client) == 0
    assert [member.room for member in pool.members] == [2, 3]
    pool.calls.clear()
    assert answered(client) == [] and pool.calls == []


def test_what_a_dead_engine_had_goes_to_another_one() -> None:
    pool = Pool(2, 2)
    client = client_of(pool, "abcd")
    client.poll(0.0)
    pool.members[0].alive = False
    assert answered(client) == []
    assert client.resent == ["a", "c"]
    pool.ends(1, "b", "d")
    assert answered(client) == ["b", "d"]
    client.poll(0.0)
    pool.ends(1, "a", "c")
    assert answered(client) == ["a", "c"] and len(client) == 0


def test_a_request_that_failed_with_its_engine_moves_and_its_answered_neighbour_counts() -> None:
    pool = Pool(3, 1)
    client = client_of(pool, "abcd")
    client.poll(0.0)
    assert pool.members[0].has == ["a", "b", "c"]
    pool.ends(0, "a")
    pool.ends(0, "b", error=EngineError("its process died"))
    pool.members[0].alive = False
    assert answered(client) == ["a"]
    assert client.resent == ["b", "c"] and len(client) == 3


def test_a_refusal_of_an_engine_that_lives_is_raised(rejects: Rejects) -> None:
    pool = Pool(1)
    client = client_of(pool, "a")
    client.poll(0.0)
    pool.ends(0, "a", error=EngineError("too long a prompt"))
    with rejects(EngineError):
        client.poll(0.0)


def test_what_is_not_the_engines_fault_is_raised_as_it_is(rejects: Rejects) -> None:
    pool = Pool(1)
    client = client_of(pool, "a")
    client.poll(0.0)
    pool.members[0].alive = False
    pool.ends(0, "a", error=RewardError("the environment is broken"))
    with rejects(RewardError):
        client.poll(0.0)


def test_without_an_engine_requests_stay_until_there_is_one(rejects: Rejects) -> None:
    pool = Pool(1)
    client = client_of(pool, "ab")
    client.poll(0.0)
    pool.members[0].alive = False
    assert answered(client) == [] and client.resent == ["a"]
    for _ in range(2):
        with rejects(NoEngineLeft, "no-engine"):
            client.poll(0.0)
    pool.members[0] = Member(room=2)
    client.poll(0.0)
    assert pool.members[0].has == ["a", "b"]


def test_the_aborted_are_never_answered() -> None:
    pool = Pool(2)
    client = client_of(pool, "abc")
    client.poll(0.0)
    client.abort({"a", "c"})
    assert pool.aborted == ["a"] and len(client) == 2
    pool.ends(0, "a", error=EngineError("aborted"))
    pool.ends(0, "b")
    assert answered(client) == ["b"] and len(client) == 0


def test_silence_is_bounded(rejects: Rejects) -> None:
    client = EngineClient(Pool(1), silence_s=0.0)
    client.submit(request("a"))
    with rejects(EngineError, "engines-silent"):
        client.poll(0.0)


def test_answers_that_come_together_are_taken_together() -> None:
    async def run() -> tuple[list[str], list[str], int]:
        mailbox = Mailbox()
        mailbox.expected = 3
        waiting = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.put(Answer("a"))
        await asyncio.sleep(0)
        mailbox.put(Answer("b"))
        first = await waiting
        mailbox.put(Answer("c"))
        return [a.request_id for a in first], [a.request_id for a in await mailbox.take()], mailbox.expected

    assert asyncio.run(run()) == (["a", "b"], ["c"], 0)
