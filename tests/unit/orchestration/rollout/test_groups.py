"""Batches from answers in any order: staleness is bounded, and every group is trained once."""

import asyncio
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from slime_like.config import RunConfig
from slime_like.data.ledger import ISSUED, Ledger, audit_run
from slime_like.data.prompts import Prompt
from slime_like.errors import EngineError, RewardError
from slime_like.interfaces import Generation, GenerationRequest, PromptInput, Scores
from slime_like.observability.timing import PhaseClock
from slime_like.orchestration.rollout import group_table
from slime_like.orchestration.rollout import groups as module
from slime_like.orchestration.rollout.engines import DeviceSwitch
from slime_like.orchestration.rollout.group_table import GENERATE, READY, REWARDED
from slime_like.orchestration.rollout.groups import Groups
from slime_like.orchestration.rollout.roles import RoleQueue
from slime_like.orchestration.rollout.scoring import RewardedGroup
from slime_like.orchestration.run import sources
from slime_like.orchestration.run.sources import SampledGroups
from slime_like.orchestration.weight_sync import SyncReport
from slime_like.system.loop_thread import LoopThread
from slime_like.trajectory import GroupedUnscoredTrajectories, ScoredTrajectory, UnscoredTrajectory
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import write_checkpoint
from tests.unit.orchestration.rollout.test_roles import Worker

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


class ShuffledEngines:
    """Engines that answer a few random requests at a time, and sometimes all die.

    Attributes:
        held: requests that are not answered, in order, and what ends their wait.
        under_way: number of them in every step, when its first samples are returned.
        sent: all requests.
        revived: version of each restart.
        by_hand: whether only ``answer`` answers.
        keeps_last: whether the last request waits, until the first groups are returned.
    """

    def __init__(self, seed: int = 0, dies_at: Collection[int] = (), by_hand: bool = False) -> None:
        self.thread = LoopThread()
        self.held: dict[int, asyncio.Future[None]] = {}
        self.under_way: dict[int, int] = {}
        self.sent: list[GenerationRequest] = []
        self.revived: list[int] = []
        self.version = self.polls = 0
        self.dead = self.keeps_last = False
        self.by_hand = by_hand
        self._lost: dict[int, Callable[[], None]] = {}
        self._dies_at = dies_at
        self._random = random.Random(seed)

    async def generate(self, request: GenerationRequest, lost: Callable[[], None]) -> list[Generation]:
        group = int(request.request_id.removeprefix("train-"))
        self.sent.append(request)
        self.held[group], self._lost[group] = asyncio.get_running_loop().create_future(), lost
        if not self.by_hand:
            asyncio.get_running_loop().call_soon(self._poll)
        try:
            await self.held[group]
        finally:
            del self.held[group]
        version = np.array([self.version])
        return [Generation(np.array([3]), np.zeros(1, np.float32), version, "stop") for _ in range(request.num_samples)]

    def check(self) -> None:
        if self.dead:
            self.revived.append(self.version)
            self.dead = False
            self.thread.loop.call_soon_threadsafe(self._poll)

    def answer(self, *groups: int) -> None:
        """Answer these groups, and wait until nothing happens any more."""

        async def end() -> None:
            for group in groups:
                self.held[group].set_result(None)
            await asyncio.sleep(0.05)

        self.thread.run(end())

    def _poll(self) -> None:
        if not self.held or self.dead:
            return
        self.polls += 1
        if self.polls in self._dies_at:
            self.dead = True
            for group in self.held:
                self._lost[group]()
            return
        kept = max(self.held) if self.keeps_last else None
        waiting = [future for group, future in self.held.items() if not future.done() and group != kept]
        self._random.shuffle(waiting)
        for future in waiting[: self._random.randint(0, 3)]:
            future.set_result(None)
        self.thread.loop.call_later(0.001, self._poll)


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
    monkeypatch.setattr(group_table, "_LOOK_EVERY_S", 0.005)
    write_checkpoint(tmp_path / "model")
    return tmp_path


def settings(run_dir: Path, reward: dict[str, Any] | None = None, **rollout: Any) -> RunConfig:
    sizes = {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES}
    return RunConfig(
        run_dir=run_dir, model={"path": run_dir / "model"}, steps=STEPS, rollout=sizes | rollout,
        algorithm={"importance": {"correction": "truncate"}}, reward=reward or {},
    )  # fmt: skip


def groups_of(
    run_dir: Path,
    engines: ShuffledEngines,
    roles: Sequence[RoleQueue] = (),
    scorer: Any = None,
    reward: dict[str, Any] | None = None,
    **rollout: Any,
) -> Groups:
    config, ledger = settings(run_dir, reward, **rollout), Ledger.begin(run_dir)
    return Groups(config, cast(Any, Prompts()), cast(Any, engines), scorer or CoinScorer(), ledger, roles)


def batches(groups: Groups, engines: ShuffledEngines, first: int = 1, last: int = STEPS) -> Iterator[list[int]]:
    """Yield each step's groups."""
    clock, rollout = PhaseClock(), groups.config.rollout
    engines.version, engines.keeps_last = first - 1, rollout.stream
    groups.table.serve(first - 1)
    for step in range(first, last + 1):
        trajectories: list[ScoredTrajectory] = []
        for part in groups.stream(step, clock) if rollout.stream else [groups.next_batch(step, clock)]:
            trajectories += part
            if part:
                engines.under_way.setdefault(step, len(engines.held))
                engines.keeps_last = False
        assert len(trajectories) == PROMPTS * SAMPLES and groups.is_complete(step)
        assert step - 1 - min(t.policy_version for t in trajectories) <= rollout.max_staleness
        groups.trained(trajectories, step)
        engines.version = step
        groups.table.serve(step)
        yield list(dict.fromkeys(t.group_id for t in trajectories))


def trained_by(groups: Groups, engines: ShuffledEngines, first: int = 1, last: int = STEPS) -> list[int]:
    try:
        return [group for batch in batches(groups, engines, first, last) for group in batch]
    finally:
        groups.close()
        engines.thread.close()


@pytest.mark.parametrize("rollout", [{}, {"max_staleness": 1}, {"max_staleness": 3}, {"oversample": 2.0}])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.acceptance) for seed in (1, 2))])
def test_every_group_is_trained_once_and_none_is_too_old(
    run_dir: Path, rollout: dict[str, Any], drop: bool, stream: bool, seed: int
) -> None:
    """With oversampling, late groups are aborted."""
    engines = ShuffledEngines(seed, dies_at=(3, 17))
    groups = groups_of(run_dir, engines, drop_zero_spread=drop, stream=stream, **rollout)
    trained = trained_by(groups, engines)
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
    assert not stream or "max_staleness" in rollout or any(engines.under_way.values())
    assert engines.revived and not engines.held


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
    engines, role = ShuffledEngines(0, dies_at=(5,)), RoleQueue("reference", request_tokens=10)
    numbers = itertools.count(1)
    workers = [SlowWorker(name, numbers) for name in ("first", "second")]
    for worker in workers:
        role.join(worker)
    opinions: list[tuple[int, float]] = []

    class Scorer(CoinScorer):
        def scored(self, groups: list[RewardedGroup], step: int) -> list[ScoredTrajectory]:
            for scored in groups:
                opinions.extend((scored.group.group_id, float(scores["ref_logprobs"])) for scores in scored.scores)
            return super().scored(groups, step)

    trained = trained_by(
        groups_of(run_dir, engines, [role], Scorer(), drop_zero_spread=True, stream=stream, **rollout), engines
    )
    role.close()
    assert len(trained) == len(set(trained)) == STEPS * PROMPTS
    assert sorted(opinions) == sorted((group, -float(group)) for group in trained for _ in range(SAMPLES))
    assert not audit_run(run_dir).problems
    (failed,) = [worker.name for worker in workers if worker.fails]
    assert role.news == [f"{failed} left the logprob pool ({failed} rank 0 died while scoring)"]


def test_groups_go_to_the_role_of_their_source(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = Prompts.next

    def of_two_sources(self: Prompts, n: int) -> list[Prompt]:
        return [replace(prompt, source=("sums", "words")[prompt.group_id % 2]) for prompt in prompts(self, n)]

    monkeypatch.setattr(Prompts, "next", of_two_sources)
    workers = {name: Worker(name) for name in ("sums", "words")}
    roles = [RoleQueue(name, request_tokens=10, source=name) for name in workers]
    for role in roles:
        role.join(workers[role.role])
    engines = ShuffledEngines()
    trained = trained_by(groups_of(run_dir, engines, roles), engines)
    for number, role in enumerate(roles):
        scored = [group for request in workers[role.role].requests for group in request]
        assert sorted(scored) == sorted(group for group in trained if group % 2 == number)
        role.close()


def test_a_resumed_run_issues_groups_in_flight_again(run_dir: Path) -> None:
    """Groups under way and ready groups continue in another run. So do groups that are issued between the copies of
    state and ledger."""
    engines = ShuffledEngines(1)
    groups = groups_of(run_dir, engines, max_staleness=2)
    before = trained_by(groups, engines, last=5)
    state = json.loads(json.dumps(groups.table.state_dict()))
    issued = groups.table.prompts.source.next(PROMPTS)
    groups.table.ledger.add([prompt.group_id for prompt in issued], ISSUED, version=groups.table.gate.version)
    groups.table.ledger.snapshot(run_dir / "copy")
    engines = ShuffledEngines(2)
    again = groups_of(run_dir, engines, max_staleness=2)
    again.table.prompts.load_state_dict(state)
    again.table.ledger.restore(run_dir / "copy", state["ledger_events"])
    after = trained_by(again, engines, first=6)
    assert sorted(before + after) == list(range(STEPS * PROMPTS))
    assert not audit_run(run_dir).problems


def test_the_state_in_a_checkpoint_keeps_its_format(run_dir: Path) -> None:
    """Interrupted prompts are issued first, then new ones."""
    prompt = {"tokens": [1, 2], "answer": "4", "epoch": 0, "row": 7, "response_tokens": None, "environment": {"a": 1}}
    state = {"data": {"issued": 6}, "in_flight": [prompt | {"group_id": 3}, prompt | {"group_id": 5}]}
    engines = ShuffledEngines(by_hand=True)
    groups = groups_of(run_dir, engines, max_staleness=1)
    groups.table.prompts.load_state_dict(state)
    assert json.loads(json.dumps(groups.table.state_dict())) == state | {"ledger_events": 0}
    groups.table.serve(0)
    issued = [group.prompt for group in groups.table.at(GENERATE)]
    assert [prompt.group_id for prompt in issued] == [3, 5, *range(6, 12)]
    assert issued[0] == Prompt(PromptInput([1, 2]), "4", 3, 0, 7, environment={"a": 1})
    assert [fields["group_id"] for fields in groups.table.state_dict()["in_flight"]] == [3, 5, *range(6, 12)]
    groups.close()
    engines.thread.close()


def sizes(groups: Groups) -> tuple[int, int]:
    """Return the numbers of groups under way, and of ready ones."""
    ready = len(groups.table.at(READY))
    return len(groups.table.at()) - ready, ready


def test_the_samples_of_the_next_batch_are_counted(run_dir: Path) -> None:
    """Rewarded and taken groups count. Dropped groups and those of later batches don't."""
    engines = ShuffledEngines(by_hand=True)
    groups = groups_of(run_dir, engines, max_staleness=1, drop_zero_spread=True, stream=True)
    groups.table.serve(0)
    engines.answer()
    assert (sizes(groups), groups.table.sampled()) == ((2 * PROMPTS, 0), 0)
    engines.answer(1, 0)
    assert (sizes(groups), groups.table.sampled()) == ((2 * PROMPTS - 2, 2), 2)
    source = SampledGroups(groups, DeviceSwitch(), Mock(), None)
    source._report = SyncReport(
        total_s=1.0, verification_s=0.1, nbytes=8, wire_nbytes=8, changed_fraction=None, transport="gloo", gather_s=0.0,
        probe_gap=None, note="look",
    )  # fmt: skip
    cast(Any, groups.table.prompts.source).dropped_prompts = 3
    figures = [source.figures(2.0) for _ in range(2)]
    names = ("queues/rollout_queue_size", "queues/train_replay_buffer_size", "rollout/dropped_prompts")
    assert [[each.metrics[name] for name in names] for each in figures] == [
        [2 * PROMPTS - 2, 2, 3],
        [2 * PROMPTS - 2, 2, 0],
    ]
    assert [len(each.notes) for each in figures] == [1, 0] and figures[0].metrics["weights/sync (s)"] == 1
    stream = groups.stream(1, PhaseClock())
    assert len(next(stream)) == 2 * SAMPLES and groups.table.sampled() == 2
    engines.answer(2)  # without spread
    assert groups.table.sampled() == 2 and len(groups.table.at(GENERATE)) == 2 * PROMPTS - 2
    engines.answer(*range(3, 7))
    assert groups.table.sampled() == PROMPTS
    groups.close()
    engines.thread.close()


def test_the_time_in_which_engines_have_nothing_to_sample(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the last group's samples to the end of a step of 10 s, if no group is being sampled then."""
    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    for place in (group_table, sources):
        monkeypatch.setattr(place, "time", clock)
    engines = ShuffledEngines(by_hand=True)
    groups = groups_of(run_dir, engines, max_staleness=1)
    source = SampledGroups(groups, DeviceSwitch(), Mock(), None)
    source._report = Mock(metrics=lambda _: {})
    source._is_first_step = False
    cast(Any, groups.table.prompts.source).dropped_prompts = 0
    groups.table.serve(0)
    engines.answer()
    answers: list[dict[float, range]] = [{2: range(4)}, {12: range(4, 8), 16: range(8, 12)}]
    shares = []
    for step, answered in enumerate(answers, start=1):
        for clock.now_s, ids in answered.items():
            engines.answer(*ids)
        clock.now_s = 10.0 * step
        source.advance(step, groups.next_batch(step, PhaseClock()))
        shares.append(source.figures(10.0).metrics["rollout/pct_time_idle (%)"])
        engines.answer()
    groups.close()
    engines.thread.close()
    assert shares == [0, pytest.approx(40)]


def test_a_step_drops_its_groups_together(run_dir: Path) -> None:
    """So the replacement of a dropped group does not depend on which group was faster."""
    engines = ShuffledEngines(by_hand=True)
    groups = groups_of(run_dir, engines, drop_zero_spread=True)
    groups.table.serve(0)
    engines.answer()
    assert not engines.held  # nothing before the training loop asks
    found: list[list[ScoredTrajectory]] = []
    waiting = threading.Thread(target=lambda: found.append(groups.next_batch(1, PhaseClock())))
    waiting.start()
    while len(engines.held) < PROMPTS:
        time.sleep(0.001)
    engines.answer(2, 0, 1)
    assert len(groups.table.at(REWARDED)) == 3 and list(engines.held) == [3]
    engines.answer(3)
    assert list(engines.held) == [4] and audit_run(run_dir).dropped == {"zero spread": 1}
    engines.answer(4)
    waiting.join(30)
    assert [t.group_id for t in found[0]] == [group for group in (0, 1, 3, 4) for _ in range(SAMPLES)]
    groups.close()
    engines.thread.close()


def test_a_slow_reward_holds_up_no_other_group(run_dir: Path) -> None:
    may_end = threading.Event()

    class Scorer(CoinScorer):
        def _rewarded(self, group: GroupedUnscoredTrajectories) -> RewardedGroup:
            assert group.group_id or may_end.wait(30)
            return super()._rewarded(group)

    engines = ShuffledEngines()
    stream = groups_of(run_dir, engines, scorer=Scorer(), stream=True).stream(1, PhaseClock())
    early = list[int | None]()
    while len(set(early)) < PROMPTS - 1:
        early += [trajectory.group_id for trajectory in next(stream)]
    assert set(early) == {1, 2, 3}
    may_end.set()
    assert {trajectory.group_id for part in stream for trajectory in part} == {0}
    engines.thread.close()


def test_an_error_of_a_task_reaches_the_loop(run_dir: Path, rejects: Rejects) -> None:
    async def refuse(*_: object) -> None:
        raise EngineError("engine 0 refused")

    engines = ShuffledEngines()
    engines.generate = refuse  # type: ignore[method-assign, assignment]
    with rejects(EngineError, "engine"):
        trained_by(groups_of(run_dir, engines, max_staleness=1), engines)


def test_a_step_without_spread_ends_the_run(run_dir: Path, rejects: Rejects) -> None:
    engines, scorer = ShuffledEngines(), CoinScorer(flat_every=1)
    with rejects(RewardError, "too-many-drops"):
        trained_by(groups_of(run_dir, engines, (), scorer, drop_zero_spread=True, max_drops_per_step=20), engines)


def test_an_abort_is_bounded(run_dir: Path, monkeypatch: pytest.MonkeyPatch, rejects: Rejects) -> None:
    async def stay(_: object) -> None:
        await asyncio.sleep(30)

    engines = ShuffledEngines()
    groups = groups_of(run_dir, engines, oversample=2.0)
    monkeypatch.setattr(groups, "_end_tasks", stay.__get__(groups))
    monkeypatch.setattr(module, "_END_TIMEOUT_S", 0.05)
    with rejects(EngineError, "abort-timeout") as caught:
        trained_by(groups, engines)
    assert caught.value.who and caught.value.phase and caught.value.remedy
