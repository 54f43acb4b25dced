"""Failed rollouts: what is trained, what the ledger says, and when a run ends."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from slime_like.config import RunConfig
from slime_like.data.ledger import audit_run
from slime_like.data.prompts import Prompt
from slime_like.errors import RewardError
from slime_like.interfaces import Conversation, Generation, PromptInput
from slime_like.orchestration.rollout.groups import Groups
from slime_like.orchestration.rollout.requests import to_group
from slime_like.orchestration.rollout.scoring import Scorer
from slime_like.orchestration.trainer.batcher import ExperienceBatcher
from slime_like.sandbox.rewards.pool import RewardItem, RewardOutcome
from slime_like.system import budget
from slime_like.trajectory import GroupedUnscoredTrajectories, ScoredTrajectory
from tests.support.rejections import Rejects
from tests.unit.orchestration.rollout.test_groups import (
    PROMPTS,
    SAMPLES,
    STEPS,
    ShuffledEngines,
    groups_of,
    settings,
    trained_by,
)
from tests.unit.orchestration.rollout.test_groups import run_dir as run_dir
from tests.unit.orchestration.rollout.test_rows import Tokenizer, config, generations, ids, normalised, plain

LOST = RewardOutcome((0.0,), (0.0,), {"reason": "timeout", "function": "judge"})
TIMEOUT = {"reason": "timeout", "function": "agent"}
GREEDY = "z"


class Judge:
    """Pool that rewards a response with its length, and cannot be reached for some of them."""

    def __init__(self, *unreachable: str) -> None:
        self._unreachable = unreachable
        self.asked: list[str] = []

    def score(self, items: Sequence[RewardItem], groups: Sequence[int]) -> list[RewardOutcome]:
        self.asked += [item.response for item in items]
        return [
            LOST
            if item.response in self._unreachable
            else RewardOutcome((float(len(item.response) ** 2),), (float(len(item.response) > 2),), {})
            for item in items
        ]


def scorer_of(judge: Judge, **sections: Any) -> Scorer:
    return Scorer(config(**sections), cast(Any, judge), Tokenizer())


def group_of(number: int, answers: list[Generation], greedy: bool = False) -> GroupedUnscoredTrajectories:
    answers = [*answers, plain(GREEDY)] if greedy else answers
    return to_group(Prompt(PromptInput(ids("p")), "answer", number, 0, 0), answers, 1.0, greedy)


def agent_timed_out() -> Generation:
    return replace(plain("RSTU"), conversation=Conversation(((0, 4),), failure=TIMEOUT))


def packed(trajectories: list[ScoredTrajectory], settings: RunConfig) -> dict[str, Any]:
    batch = ExperienceBatcher(settings.algorithm, settings.trainer, settings.model, 2, 0).batch(trajectories)
    packs = [pack for replica in batch.replicas for minibatch in replica for pack in minibatch]
    found = {f"{n} {each.name}": getattr(pack, each.name) for n, pack in enumerate(packs) for each in fields(pack)}
    return found | {"denominators": batch.denominators}


@pytest.mark.parametrize(
    "advantage", ["grpo", "rloo", "opo", "reinforce_pp", "gdpo", "optimal_token_baseline", "remax"]
)
def test_a_step_with_masked_rollouts_equals_one_without_them(advantage: str) -> None:
    """Bit for bit: tokens, advantages, weights and denominators. Rollouts of three rows and of one row fail in a
    judge, and one in its agent."""
    algorithm = {"advantage": advantage, "reduction": "groups", "minibatches": 1}
    given = {"algorithm": algorithm, "trainer": {"target_tokens_per_batch": 16}}
    more, greedy = [plain("VW"), plain("XYZAB")], advantage == "remax"
    groups = [
        group_of(7, [*generations(), *more], greedy),
        group_of(9, [*more, agent_timed_out(), *generations()], greedy),
    ]
    judge = Judge("FGH", "IJKL")
    disturbed, scorer = [], scorer_of(judge, **given)
    rewarded = scorer.rewards(groups)
    disturbed = scorer.scored(rewarded, step=3)
    assert "RSTU" not in judge.asked
    lost = {"7-0", "7-1", "9-2", "9-3", "9-4"}
    assert {row.rollout_id for group in rewarded for row in group.failed} == lost
    reasons = [row.reward_metadata["function"] for group in rewarded for row in group.failed]
    assert Counter(reasons) == {"judge": 4, "agent": 1}
    without = [
        replace(group, trajectories=[row for row in group.trajectories if row.rollout_id not in lost])
        for group in groups
    ]
    scorer = scorer_of(Judge(), **given)
    undisturbed = scorer.scored(scorer.rewards(without), step=3)
    one, other = packed(disturbed, config(**given)), packed(undisturbed, config(**given))
    assert one.keys() == other.keys()
    for name, values in one.items():
        same = torch.equal(values, other[name]) if isinstance(values, Tensor) else values == other[name]
        assert same, name
    if advantage == "grpo":
        found = {row.rollout_id: float(row.advantages.max()) for row in disturbed}
        assert [found[f"7-{n}"] for n in (2, 3, 4, 5)] == pytest.approx(normalised([9.0, 1.0, 4.0, 25.0]), rel=1e-6)


@pytest.mark.parametrize(
    ("advantage", "unreachable", "left"),
    [("grpo", ["IJKL", "VW"], 0), ("reinforce_pp", ["IJKL", "VW"], 1), ("remax", ["IJKL"], 2), ("remax", [GREEDY], 0)],
)
def test_a_group_without_enough_rollouts_is_empty(advantage: str, unreachable: list[str], left: int) -> None:
    group = group_of(7, [plain("IJKL"), plain("VW"), plain("X")], advantage == "remax")
    (found,) = scorer_of(Judge(*unreachable), algorithm={"advantage": advantage}).rewards([group])
    assert (len(found.group.trajectories), len(found.totals), len(found.failed)) == (left, left, len(unreachable))
    assert found.rewards.shape == found.successes.shape == (left, 1)


@pytest.mark.parametrize(
    ("reward", "agent", "fates"),
    [
        ("mask", "zero", {"7-0": None, "7-2": "zeroed"}),
        ("zero", "resample", {"7-0": "zeroed", "7-2": None}),
        ("zero", "zero", {"7-0": "zeroed", "7-2": "zeroed"}),
    ],
)
def test_rewards_and_agents_have_their_own_setting(reward: str, agent: str, fates: dict[str, str | None]) -> None:
    """A zeroed failure is trained with reward 0. A program that ended by its own fault has answered."""
    own = replace(plain("ABC"), conversation=Conversation(((0, 3),), failure=TIMEOUT | {"fault": "program"}))
    functions, sections = [{"name": "judge", "options": {"url": "http://a", "model": "b"}}], {}
    sections = {
        "reward": {"functions": functions, "on_failure": reward},
        "rollout": {"agent": {"name": "some:agent", "on_failure": agent}},
    }
    (found,) = scorer_of(Judge("IJKL"), **sections).rewards(
        [group_of(7, [plain("IJKL"), own, agent_timed_out(), plain("X")])]
    )
    kept = {row.rollout_id: each for row, each in zip(found.group.trajectories, found.metadata, strict=True)}
    totals = dict(zip(kept, found.totals.tolist(), strict=True))
    assert {name: kept.get(name, {}).get("outcome") for name in fates} == fates
    assert [row.rollout_id for row in found.failed] == [name for name, fate in fates.items() if fate is None]
    assert found.resamples == ("resample" in (reward, agent)) and len(found.zeroed) == list(fates.values()).count(
        "zeroed"
    )
    assert totals["7-1"] == 0 and "outcome" not in kept["7-1"] and totals["7-3"] == 1
    assert not any(totals[name] for name, fate in fates.items() if fate)


def test_without_a_weight_no_failure_costs_a_rollout() -> None:
    """Distillation needs no rewards."""
    functions = [{"name": "math_verify", "weight": 0}]
    scorer = scorer_of(Judge("IJKL"), reward={"functions": functions}, distillation={"coef": 1.0, "path": "unused"})
    (found,) = scorer.rewards([group_of(7, [plain("IJKL"), plain("X")])])
    assert [each.get("outcome") for each in found.metadata] == ["zeroed", None] and not found.failed


# --------------------------------------------------------------------------------------------------- groups of a run
class Outage:
    """Pool that cannot be reached for some groups, the first ``times`` they are to be scored, and else flips a coin."""

    def __init__(self, every: int, times: int, last: int = 10**6) -> None:
        self._every, self._times, self._last = every, times, last
        self.asked = Counter[int]()

    def score(self, items: Sequence[RewardItem], groups: Sequence[int]) -> list[RewardOutcome]:
        self.asked.update(set(groups))
        return [
            LOST
            if group % self._every == 0 and self.asked[group] <= self._times and group <= self._last
            else RewardOutcome((float(place % 2),), (1.0,), {})
            for place, group in enumerate(groups)
        ]


class LateOutage(Outage):
    """Pool that cannot be reached for this many times the groups of a step, after those of the first step."""

    def __init__(self, steps: int) -> None:
        super().__init__(1, 0)
        self.lost = range(PROMPTS, (1 + steps) * PROMPTS)

    def score(self, items: Sequence[RewardItem], groups: Sequence[int]) -> list[RewardOutcome]:
        found = zip(groups, super().score(items, groups), strict=True)
        return [LOST if group in self.lost else outcome for group, outcome in found]


def started(run_dir: Path, outage: Outage, reward: dict[str, Any], **rollout: Any) -> tuple[Groups, ShuffledEngines]:
    scorer = Scorer(settings(run_dir, reward, **rollout), cast(Any, outage), Tokenizer())
    engines = ShuffledEngines(0, dies_at=(5,))
    return groups_of(run_dir, engines, scorer=scorer, reward=reward, **rollout), engines


@pytest.mark.parametrize("rollout", [{}, {"max_staleness": 2}])
@pytest.mark.parametrize("stream", [False, True])
def test_each_resampled_group_is_trained_once(run_dir: Path, rollout: dict[str, Any], stream: bool) -> None:
    """As without the failures: the same groups, from the same requests, with the same seeds."""
    reward, outage = {"on_failure": "resample"}, Outage(every=3, times=2)
    groups, engines = started(run_dir, outage, reward, stream=stream, **rollout)
    trained = trained_by(groups, engines)
    audit = audit_run(run_dir)
    assert sorted(trained) == list(range(STEPS * PROMPTS)) and not audit.problems and not audit.dropped
    again = [group for group in trained if group % 3 == 0]
    assert audit.failed == {"resampled: timeout": len(again) * SAMPLES * 2}
    assert all(outage.asked[group] == (3 if group in again else 1) for group in trained)
    for group in again:
        assert len({request.seed for request in engines.sent if request.request_id == f"train-{group}"}) == 1
    failed = groups.table.take_failed()
    assert {row.reward_metadata["outcome"] for row in failed} == {"resampled"} and not groups.table.take_failed()


@pytest.mark.parametrize(("on_failure", "times"), [("mask", 1), ("resample", 3)])
def test_masked_groups_are_replaced(run_dir: Path, on_failure: str, times: int) -> None:
    """Groups that fail whenever they are sampled are masked in the end, and others take their place."""
    reward = {"on_failure": on_failure, "max_failed_fraction": 1}
    trained = trained_by(*started(run_dir, Outage(every=3, times=times), reward))
    audit = audit_run(run_dir)
    assert len(trained) == STEPS * PROMPTS and all(group % 3 for group in trained) and not audit.problems
    lost = audit.dropped.pop("failures")
    expected = {"masked: timeout": lost * SAMPLES} | ({"resampled: timeout": lost * SAMPLES * 2} if times > 1 else {})
    assert audit.failed == expected and not audit.dropped


@pytest.mark.parametrize("on_failure", ["mask", "resample", "zero"])
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_too_many_failures_end_the_run(run_dir: Path, rejects: Rejects, on_failure: str, max_staleness: int) -> None:
    reward, ahead = {"on_failure": on_failure, "max_failed_fraction": 0.4}, {"max_staleness": max_staleness}
    with rejects(RewardError, "too-many-failures"):
        trained_by(*started(run_dir, Outage(every=2, times=9), reward, **ahead))


def test_as_many_failures_as_allowed_do_not_end_the_run(run_dir: Path) -> None:
    """Half of each step's rollouts fail, and count with reward 0."""
    outage, reward = Outage(every=2, times=1), {"on_failure": "zero", "max_failed_fraction": 0.5}
    assert len(trained_by(*started(run_dir, outage, reward))) == STEPS * PROMPTS
    assert audit_run(run_dir).failed == {"zeroed: timeout": STEPS * PROMPTS * SAMPLES // 2}


def test_an_outage_of_a_later_step_is_survived(run_dir: Path) -> None:
    """All rollouts of a step fail. Other prompts replace their groups, and every group is accounted for."""
    groups, engines = started(run_dir, outage := LateOutage(1), {})
    trained, audit = trained_by(groups, engines), audit_run(run_dir)
    assert not audit.problems and audit.dropped == {"failures": PROMPTS} and audit.trained == STEPS * PROMPTS
    assert sorted(trained) == [number for number in range((STEPS + 1) * PROMPTS) if number not in outage.lost]
    (note,) = groups.table.failures.news
    assert f"{PROMPTS * SAMPLES} of {PROMPTS * SAMPLES} rollouts for one step failed" in note and "1 of 2" in note


def test_the_third_outage_within_an_hour_ends_the_run(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rejects: Rejects
) -> None:
    with rejects(RewardError, "too-many-failures"):
        trained_by(*started(run_dir, LateOutage(3), {}))
    now = iter(range(0, 10**9, 2000))  # each outage comes more than an hour after the one before the last
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: next(now)))
    assert len(trained_by(*started(tmp_path, LateOutage(3), {}))) == STEPS * PROMPTS


def test_an_outage_of_one_step_is_survived(run_dir: Path) -> None:
    """With a fraction of 1, the step trains the groups that come after the outage."""
    outage = Outage(every=1, times=1, last=PROMPTS - 1)
    trained = trained_by(*started(run_dir, outage, {"max_failed_fraction": 1}))
    audit = audit_run(run_dir)
    assert trained[:PROMPTS] == list(range(PROMPTS, 2 * PROMPTS)) and audit.dropped == {"failures": PROMPTS}
    assert audit.trained == STEPS * PROMPTS and not audit.problems
