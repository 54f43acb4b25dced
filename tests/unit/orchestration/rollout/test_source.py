"""Batches from answers in any order: staleness is bounded, and every group is trained once."""

import itertools
import json
import random
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from slime_like.config import RunConfig
from slime_like.data.ledger import ISSUED, Ledger, audit_run
from slime_like.data.prompts import Prompt
from slime_like.errors import EngineError, RewardError
from slime_like.interfaces import Generation, PromptInput, Scores
from slime_like.observability.records import PhaseClock
from slime_like.orchestration.rollout import source as source_module
from slime_like.orchestration.rollout.colocation import Turns
from slime_like.orchestration.rollout.group_store import GENERATE, GroupTask
from slime_like.orchestration.rollout.role_pool import RolePool
from slime_like.orchestration.rollout.scoring import RewardedGroup
from slime_like.orchestration.rollout.source import RolloutSource, source_class
from slime_like.orchestration.rollout.supervisor import NoEngineLeft
from slime_like.trajectory import GroupedUnscoredTrajectories, ScoredTrajectory, UnscoredTrajectory
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import write_checkpoint
from tests.unit.orchestration.rollout.test_role_pool import Worker

PROMPTS, SAMPLES, STEPS = 4, 2, 12


class Prompts:
    """An endless source of numbered prompts."""

    def __init__(self) -> None:
        self.issued = 0

    def next(self, n: int) -> list[Prompt]:
        first, self.issued = self.issued, self.issued + n
        return [Prompt(PromptInput([1, 2]), "", group, 0, 0) for group in range(first, first + n)]

    def state_dict(self) -> dict[str, Any]:
        return {"issued": self.issued}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.issued = state["issued"]


class ShuffledClient:
    """Client that answers a few random requests at every poll, and sometimes loses its engine."""

    def __init__(self, seed: int, dies_at: Collection[int] = ()) -> None:
        self.held: list[GroupTask] = []  # what it has not answered
        self.under_way: dict[int, int] = {}  # in every step, when its first samples are returned
        self.polls = 0
        self.version = 0
        self.dead = False
        self._dies_at = dies_at
        self._random = random.Random(seed)
        self._guard = threading.Lock()

    def poll(
        self, tasks: Sequence[GroupTask], timeout_s: float
    ) -> tuple[list[tuple[GroupTask, list[Generation]]], list[GroupTask]]:
        self.polls += 1
        self.held = list(tasks)
        if self.polls in self._dies_at:
            self.dead = True
            return [], self.held
        if self.dead:
            raise NoEngineLeft("the only engine died")
        self._random.shuffle(self.held)
        count = self._random.randint(0, min(3, len(self.held)))
        answered, self.held = self.held[:count], self.held[count:]
        for task in answered:
            task.answer = object()  # like Ray's reference
        return [(task, [self._generation() for _ in range(task.request.num_samples)]) for task in answered], []

    def abort(self, tasks: Sequence[GroupTask]) -> None:
        self.held = []

    def _generation(self) -> Generation:
        return Generation(np.array([3]), np.zeros(1, np.float32), np.array([self.version]), "stop")


@dataclass
class CoinScorer:
    """Scorer with equal rewards in every ``flat_every``-th group. Length penalties differ in all groups."""

    flat_every: int = 3

    def rewards(self, groups: list[GroupedUnscoredTrajectories]) -> list[RewardedGroup]:
        return [self._rewarded(group) for group in groups]

    def _rewarded(self, group: GroupedUnscoredTrajectories) -> RewardedGroup:
        is_flat = (group.group_id + 1) % self.flat_every == 0
        rewards = torch.zeros(SAMPLES) if is_flat else torch.arange(float(SAMPLES))
        totals = rewards - torch.arange(float(SAMPLES)) / 2
        return RewardedGroup(group, rewards[:, None], rewards[:, None], totals, [{}] * SAMPLES, [{}] * SAMPLES)

    def scored(self, groups: list[RewardedGroup], step: int) -> list[ScoredTrajectory]:
        return [trajectory for scored in groups for trajectory in scored.group.trajectories]  # type: ignore[misc]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(source_module, "_SHORT_POLL_S", 0.005)
    write_checkpoint(tmp_path / "model")
    return tmp_path


def settings(run_dir: Path, reward: dict[str, Any] | None = None, **rollout: Any) -> RunConfig:
    sizes = {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES}
    return RunConfig(
        run_dir=run_dir, model={"path": run_dir / "model"}, steps=STEPS, rollout=sizes | rollout,
        algorithm={"importance": {"correction": "truncate"}}, reward=reward or {},
    )  # fmt: skip


def source(
    run_dir: Path,
    client: ShuffledClient,
    pools: Sequence[RolePool] = (),
    scorer: CoinScorer | None = None,
    reward: dict[str, Any] | None = None,
    **rollout: Any,
) -> tuple[RolloutSource, list[int]]:
    revived: list[int] = []

    def revive() -> None:
        if client.dead:
            revived.append(client.version)
        client.dead = False

    config = settings(run_dir, reward, **rollout)
    made = source_class(config.rollout)(
        config, Prompts(), client, scorer or CoinScorer(), Turns(),  # type: ignore[arg-type]
        Ledger.begin(run_dir), SimpleNamespace(revive=revive), pools,  # type: ignore[arg-type]
    )  # fmt: skip
    return made, revived


def batches(
    made: RolloutSource,
    client: ShuffledClient,
    first: int = 1,
    last: int = STEPS,
    stream: bool = False,
    max_staleness: int = 0,
) -> Iterator[list[int]]:
    clock = PhaseClock()
    client.version = first - 1
    made.synced(first - 1)
    for step in range(first, last + 1):
        trajectories: list[ScoredTrajectory] = []
        for part in made.stream(step, clock) if stream else [made.next_batch(step, clock)]:
            trajectories += part
            client.under_way.setdefault(step, len(client.held))
        groups = list(dict.fromkeys(t.group_id for t in trajectories))
        oldest = min(t.policy_version for t in trajectories)
        assert len(trajectories) == PROMPTS * SAMPLES
        assert step - 1 - oldest <= max_staleness
        made.trained(trajectories, step)
        client.version = step
        made.synced(step)
        yield groups


@pytest.mark.parametrize("rollout", [{}, {"max_staleness": 1}, {"max_staleness": 3}, {"oversample": 2.0}])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_group_is_trained_once_and_none_is_too_old(
    run_dir: Path, rollout: dict[str, Any], drop: bool, stream: bool, seed: int
) -> None:
    """With oversampling, late groups are aborted."""
    client, ahead = ShuffledClient(seed, dies_at=(3, 17)), rollout.get("max_staleness", 0)
    made, revived = source(run_dir, client, drop_zero_spread=drop, **rollout)
    trained = [group for batch in batches(made, client, stream=stream, max_staleness=ahead) for group in batch]
    made.close()
    assert len(trained) == len(set(trained)) == STEPS * PROMPTS
    audit = audit_run(run_dir)
    assert not audit.problems
    assert (audit.trained, audit.in_flight) == (STEPS * PROMPTS, ())
    assert audit.issued == audit.trained + sum(audit.dropped.values())
    assert ("zero spread" in audit.dropped, "oversampled" in audit.dropped) == (drop, "oversample" in rollout)
    assert not drop or all(group % 3 != 2 for group in trained)
    if not drop and not rollout:  # each step has the next prompts, streamed in any order
        sizes = range(0, len(trained), PROMPTS)
        assert [group for i in sizes for group in sorted(trained[i : i + PROMPTS])] == sorted(trained)
        assert stream or trained == sorted(trained)
    assert not stream or ahead or all(client.under_way.values())  # no poll answers a whole step
    assert len(revived) >= 1 and not (client.held and ahead == 0)


class SlowWorker(Worker):
    """Slow worker that fails if it gets the seventh request of all workers that share ``numbers``."""

    def __init__(self, name: str, numbers: Iterator[int]) -> None:
        super().__init__(name)
        self._numbers = numbers

    def score(self, trajectories: list[UnscoredTrajectory]) -> list[Scores]:
        self.fails = next(self._numbers) == 7
        time.sleep(0.001)
        super().score(trajectories)
        return [{"ref_logprobs": torch.full((t.response_len,), -float(t.group_id))} for t in trajectories]


@pytest.mark.parametrize("rollout", [{}, {"oversample": 2.0}, {"max_staleness": 2}])
@pytest.mark.parametrize("stream", [False, True])
def test_groups_are_ready_when_the_reference_has_scored_them(
    run_dir: Path, rollout: dict[str, Any], stream: bool
) -> None:
    client, pool = ShuffledClient(0, dies_at=(5,)), RolePool("reference", request_tokens=10)
    numbers = itertools.count(1)
    workers = [SlowWorker(name, numbers) for name in ("first", "second")]
    for worker in workers:
        pool.join(worker)
    opinions: list[tuple[int, float]] = []

    class Scorer(CoinScorer):
        def scored(self, groups: list[RewardedGroup], step: int) -> list[ScoredTrajectory]:
            for scored in groups:
                opinions.extend((scored.group.group_id, float(scores["ref_logprobs"])) for scores in scored.scores)
            return super().scored(groups, step)

    made, _ = source(run_dir, client, [pool], Scorer(), drop_zero_spread=True, **rollout)
    steps = batches(made, client, stream=stream, max_staleness=rollout.get("max_staleness", 0))
    trained = [group for batch in steps for group in batch]
    made.close()
    pool.close()
    assert len(trained) == len(set(trained)) == STEPS * PROMPTS
    assert sorted(opinions) == sorted((group, -float(group)) for group in trained for _ in range(SAMPLES))
    audit = audit_run(run_dir)
    assert not audit.problems
    (failed,) = [worker.name for worker in workers if worker.fails]
    assert pool.news == [f"{failed} left the logprob pool ({failed} rank 0 died while scoring)"]


def test_groups_go_to_the_pool_of_their_source(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = Prompts.next

    def of_two_sources(self: Prompts, n: int) -> list[Prompt]:
        return [replace(prompt, source=("sums", "words")[prompt.group_id % 2]) for prompt in prompts(self, n)]

    monkeypatch.setattr(Prompts, "next", of_two_sources)
    workers = {name: Worker(name) for name in ("sums", "words")}
    pools = [RolePool(name, request_tokens=10, source=name) for name in workers]
    for pool in pools:
        pool.join(workers[pool.role])
    client = ShuffledClient(0)
    made, _ = source(run_dir, client, pools)
    trained = [group for batch in batches(made, client) for group in batch]
    made.close()
    for number, pool in enumerate(pools):
        scored = [group for request in workers[pool.role].requests for group in request]
        assert sorted(scored) == sorted(group for group in trained if group % 2 == number)
        pool.close()


def test_a_resumed_run_issues_groups_in_flight_again(run_dir: Path) -> None:
    """Groups under way and ready groups continue in another source. So do groups that the thread issues between the
    copies of state and ledger."""
    client = ShuffledClient(1)
    made, _ = source(run_dir, client, max_staleness=2)
    before = [group for batch in batches(made, client, last=5, max_staleness=2) for group in batch]
    made.close()
    state = json.loads(json.dumps(made.store.state_dict()))
    issued = made.store.prompts.next(PROMPTS)
    made.store.ledger.add([prompt.group_id for prompt in issued], ISSUED, version=made.store.gate.version)
    made.store.ledger.snapshot(run_dir / "copy")
    client = ShuffledClient(2)
    again, _ = source(run_dir, client, max_staleness=2)
    again.store.load_state_dict(state)
    again.store.ledger.restore(run_dir / "copy", state["ledger_events"])
    after = [group for batch in batches(again, client, first=6, max_staleness=2) for group in batch]
    again.close()
    assert sorted(before + after) == list(range(STEPS * PROMPTS))
    assert not audit_run(run_dir).problems


def test_the_state_in_a_checkpoint_keeps_its_format(run_dir: Path) -> None:
    """Interrupted prompts are issued first, then new ones."""
    prompt = {"tokens": [1, 2], "answer": "4", "epoch": 0, "row": 7, "response_tokens": None, "environment": {"a": 1}}
    state = {"data": {"issued": 6}, "in_flight": [prompt | {"group_id": 3}, prompt | {"group_id": 5}]}
    store = source(run_dir, ShuffledClient(0))[0].store
    store.load_state_dict(state)
    assert json.loads(json.dumps(store.state_dict())) == state | {"ledger_events": 0}
    store.issue()
    issued = [task.prompt for task in store.at(GENERATE)]
    assert [prompt.group_id for prompt in issued] == [3, 5, 6, 7]
    assert issued[0] == Prompt(PromptInput([1, 2]), "4", 3, 0, 7, environment={"a": 1})
    assert [fields["group_id"] for fields in store.state_dict()["in_flight"]] == [3, 5, 6, 7]


def test_the_samples_of_the_next_batch_are_counted(run_dir: Path) -> None:
    """Rewarded and taken groups count. Dropped groups and those of later batches don't."""
    store = source(run_dir, ShuffledClient(0), max_staleness=1)[0].store
    store.issue()
    tasks = store.at(GENERATE)
    assert (len(tasks), store.sampled()) == (2 * PROMPTS, 0)
    store.generated([tasks[2], tasks[0]])
    assert store.sampled() == 2
    tasks[2].rewarded = RewardedGroup(SimpleNamespace(), *[torch.zeros(0)] * 3, [], [])  # type: ignore[arg-type]
    store.add_ready([tasks[2]])
    assert store.sampled() == 2
    assert len(store.take()) == 1 and store.sampled() == 2
    store.drop([tasks[0]], "zero spread")
    assert store.sampled() == 1
    store.generated([tasks[1], *tasks[3:7]])
    assert store.sampled() == PROMPTS


def test_an_error_of_the_thread_reaches_the_loop(run_dir: Path, rejects: Rejects) -> None:
    client = ShuffledClient(0)
    made, _ = source(run_dir, client, max_staleness=1)
    client.poll = Mock(side_effect=EngineError("engine 0 refused"))  # type: ignore[method-assign]
    with rejects(EngineError, "engine"):
        next(batches(made, client))
    made.close()


def test_a_task_without_spread_ends(run_dir: Path, rejects: Rejects) -> None:
    client = ShuffledClient(0)
    made, _ = source(run_dir, client, scorer=CoinScorer(flat_every=1), drop_zero_spread=True, max_drops_per_step=20)
    with rejects(RewardError, "too-many-drops"):
        next(batches(made, client))
