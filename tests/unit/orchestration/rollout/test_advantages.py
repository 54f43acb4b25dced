"""Rewards to advantages, compared with plain sums. The trainers are one rank that holds real packs."""

import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_like.algorithms import pack_sequences, zero_weight_pack
from slime_like.algorithms.packing.pack import unpack_response_logprobs
from slime_like.config import RunConfig
from slime_like.errors import ConfigError, RewardError, TrainerError
from slime_like.orchestration.rollout.advantages import Advantages, distill, normalize_importance, require_group_scope
from slime_like.orchestration.rollout.rows import rollouts_of
from slime_like.orchestration.trainer.rank_training import RankTraining
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory
from tests.support.pending import OneRank
from tests.support.rejections import Rejects
from tests.support.rollout_rows import cut_into_rows
from tests.unit.algorithms.cases import batch

SHAPES = [(3, 4), (2, 1), (5, 2), (2, 7), (4, 3), (1, 6)]
FUNCTIONS = {"functions": [{"name": "math_verify", "weight": 2.0}, {"name": "length", "options": {"limit": 9}}]}


def config(**algorithm: Any) -> RunConfig:
    raw = {"run_dir": "unused", "model": {"path": "unused"}, "reward": FUNCTIONS, "rollout": {"max_new_tokens": 8}}
    return RunConfig.model_validate(raw | {"algorithm": algorithm})


def test_weights_and_overlong_penalty() -> None:
    rewards = torch.tensor([[1.0, 0.5], [0.0, 0.25], [1.0, 0.0]])
    assert Advantages(config()).totals(rewards, [4, 7, 8]).tolist() == [2.5, 0.25, 2.0]
    shaped = Advantages(config(overlong={"buffer": 4, "factor": 0.5})).totals(rewards, [4, 7, 8])
    assert shaped.tolist() == [2.5, 0.25 - 0.375, 1.5]


def test_shuffled_advantages_are_the_same_ones_in_another_order() -> None:
    totals, groups = torch.arange(40.0), [i // 4 for i in range(40)]
    plain = Advantages(config()).of_step(totals, groups, step=3)
    control = config().model_copy(update={"debug": config().debug.model_copy(update={"shuffle_advantages": True})})
    shuffled = Advantages(control).of_step(totals, groups, step=3)
    assert sorted(plain.tolist()) == sorted(shuffled.tolist()) and not torch.equal(plain, shuffled)


ESTIMATORS = """
from slime_like.algorithms import AdvantageEstimator

def divided(rewards, groups):
    return rewards.reshape(3, 5)

def short(rewards, groups):
    return rewards[1:]

raises = AdvantageEstimator(divided, "group")
no_tensor = AdvantageEstimator(lambda rewards, groups: rewards.tolist(), "group")
endless = AdvantageEstimator(lambda rewards, groups: rewards / 0, "group")
groupwise = AdvantageEstimator(lambda rewards, groups: rewards, "group")
batchwise = AdvantageEstimator(lambda rewards, groups: rewards, "batch")
"""
# name, failure, place of the failing line or the definition
FAULTY = [
    ("own_estimators:raises", "RuntimeError: shape '[3, 5]' is invalid", "own_estimators.py:5"),
    ("own_estimators:no_tensor", "ValueError: advantage estimator '{}' gave list for 4", "own_estimators.py:11"),
    ("own_estimators:endless", "ValueError: advantage estimator '{}' gave sample 0 the adv", "own_estimators.py:12"),
    ("own_estimators:short", "ValueError: advantage estimator", "own_estimators.py:7"),
    ("own_estimators:missing", "ValueError: ", "own_estimators.py"),
    ("own_broken:anything", "", "own_broken.py:2"),
]


@pytest.fixture
def users_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_estimators.py").write_text(ESTIMATORS)
    (tmp_path / "own_broken.py").write_text("import os\nos.environ['there is no such thing']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("own_estimators", None)


@pytest.mark.parametrize(("name", "failure", "place"), FAULTY, ids=[name for name, *_ in FAULTY])
def test_a_failing_custom_estimator_is_named(users_code: Path, name: str, failure: str, place: str) -> None:
    with pytest.raises(RewardError) as caught:
        Advantages(config(advantage=name)).of_step(torch.arange(4.0), [0, 0, 1, 1], step=7)
    assert str(caught.value).startswith(f"step 7: algorithm.advantage={name} ")
    assert failure.format(name) in str(caught.value)
    assert str(caught.value).endswith(f" ({users_code / place}); correct it")
    assert f"{type(caught.value.__cause__).__name__}: " in (caught.value.users_traceback or "")


def test_streaming_needs_a_group_estimator(users_code: Path, rejects: Rejects) -> None:
    require_group_scope("own_estimators:groupwise")
    for refused in ("batchwise", "short"):
        with rejects(ConfigError, "config"):
            require_group_scope(f"own_estimators:{refused}")


LEVELS = """
import torch
from slime_like.algorithms import AdvantageEstimator

def to_go(rewards, groups, lengths):
    found = []
    for group, part in zip(groups.index.tolist(), rewards.split(lengths.tolist())):
        found += [8 * group + sum(float(r) / 2**k for k, r in enumerate(part[first:])) for first in range(len(part))]
    return torch.tensor(found, dtype=rewards.dtype)

turn = AdvantageEstimator(to_go, "group", "turn")
token = AdvantageEstimator(to_go, "group", "token")
"""
# Loss masks of the rows of three rollouts in groups 0, 1 and 1. The last one has no token with loss. An entry's
# advantage is the reward, 4, 2 or 1, halved for each entry up to the last one, plus 8 in group 1.
MASKS = [["1101", "011"], ["0110"], ["00"]]
BELOW_SAMPLES: dict[str, list[list[float]]] = {
    "turn": [[1, 1, 0, 2], [0, 4, 4], [0, 10, 10, 0], [0, 0]],
    "token": [[0.25, 0.5, 0, 1], [0, 2, 4], [0, 9, 10, 0], [0, 0]],
}


def test_advantages_below_samples_are_spread_over_tokens_with_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a rollout never share a turn, even without an observation between them."""
    (tmp_path / "own_levels.py").write_text(LEVELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = iter(batch([(2, len(mask)) for rows in MASKS for mask in rows]))
    rows_of_all = []
    for number, rows in enumerate(MASKS):
        shared: dict[str, Any] = {"rollout_id": f"r{number}", "group_id": (number + 1) // 2}
        masks = [torch.tensor([letter == "1" for letter in mask]) for mask in rows]
        rows_of_all += [replace(next(made), loss_mask=mask, **shared) for mask in masks]
    for level, expected in BELOW_SAMPLES.items():
        settings, totals = config(advantage=f"own_levels:{level}"), torch.tensor([4.0, 2.0, 1.0])
        found = Advantages(settings).of_rows(rollouts_of(rows_of_all), totals[:, None].expand(3, 2), totals, step=1)
        assert [found[row.sequence_id].tolist() for row in rows_of_all] == expected
    sys.modules.pop("own_levels")


def one_rank(settings: RunConfig, trajectories: list[ScoredTrajectory]) -> tuple[Any, list[PackedTrajectory]]:
    """A trainer group of one rank that has loaded and scored its packs."""
    rank = RankTraining(settings)
    packs = [pack_sequences(trajectories[:4]), pack_sequences(trajectories[4:])]
    scored = [pack.old_logprobs for pack in packs]
    rank.load_batch([[packs[0], zero_weight_pack(packs[0])], [packs[1]]])
    for pack, old_logprobs in zip(packs, scored, strict=True):
        pack.old_logprobs = old_logprobs
    ranks = OneRank()
    ranks.part = rank
    return ranks, packs


@pytest.mark.parametrize("several_rows", [False, True])
def test_kl_in_the_reward(several_rows: bool, rejects: Rejects) -> None:
    """The advantage of ``reward - coef * sum of (log pi - log ref)`` reaches every response token of the packs.

    The sum is of a whole rollout, even if its rows are of any length, in any order and pack.
    """
    penalised = {} if several_rows else {"overlong": {"buffer": 4}}
    settings = config(kl_reward={"coef": 0.1}, advantage="grpo_mean_only", **penalised)
    whole, totals = batch(SHAPES), []
    for t in whole:
        assert t.old_logprobs is not None and t.ref_logprobs is not None
        kl = sum((t.old_logprobs - t.ref_logprobs)[t.loss_mask].tolist())
        overlong = 0.0 if several_rows else max(0.0, min(1.0, (t.response_len - 4) / 4))
        totals.append(2 * float(t.rewards[0]) + float(t.rewards[1]) - overlong - 0.1 * kl)
    expected = {}
    for i, t in enumerate(whole):
        expected[t.rollout_id] = totals[i] - statistics.mean(totals[i // 2 * 2 : i // 2 * 2 + 2])
    rows = [row for i, t in enumerate(whole) for row in cut_into_rows(t, range(1, t.response_len, 1 + i % 3))]
    rows = sorted(rows, key=lambda row: row.sequence_id[::-1]) if several_rows else whole
    trainers, packs = one_rank(settings, rows)
    Advantages(settings).penalize_kl(trainers, rows, 1, coefficient=0.1)
    wanted = [expected[row.rollout_id] for row in rows]
    assert [float(row.advantages.unique()) for row in rows] == pytest.approx(wanted, rel=1e-5)
    for pack in packs:
        tokens = zip(pack.rollout_ids, pack.response_lens.tolist(), strict=True)
        spread = [expected[name] for name, length in tokens for _ in range(length)]
        assert pack.advantages is not None and pack.advantages.tolist() == pytest.approx(spread, rel=1e-5)
        pack.ref_logprobs = None
    with rejects(TrainerError, "no-reference-logprobs"):
        Advantages(settings).penalize_kl(trainers, rows, 1, coefficient=0.1)


def test_values_of_a_critic_give_advantages_and_targets() -> None:
    """By hand, in the order of tokens: rows of a rollout follow each other, and the KL is subtracted at each token."""
    settings = config(advantage={"name": "gae", "gamma": 0.9, "lam": 0.8}, kl_reward={"coef": 0.1})
    settings = settings.model_copy(update={"critic": settings.critic.model_copy(update={"lam": 1.0})})
    whole = batch(SHAPES)
    rows = [row for i, t in enumerate(whole) for row in cut_into_rows(t, range(1, t.response_len, 2 + i % 3))]
    trainers, packs = one_rank(settings, rows)
    drawn = torch.Generator().manual_seed(3)
    values = {row.sequence_id: torch.randn(row.response_len, generator=drawn) for row in rows}
    targets, kl = Advantages(settings).of_values(trainers, rows, values, 1, coefficient=0.1)
    kls, found = list[float](), {row.sequence_id: row.advantages.tolist() for row in rows}
    for rollout in rollouts_of(rows):
        total = 2 * float(rollout.last.rewards[0]) + float(rollout.last.rewards[1])
        tokens = [(row, t) for row in rollout.rows for t in range(row.response_len) if row.loss_mask[t]]
        following, advantage, gain = 0.0, 0.0, 0.0
        kls.append(0.0)
        for place, (row, t) in enumerate(reversed(tokens)):
            assert row.old_logprobs is not None and row.ref_logprobs is not None
            difference = float(row.old_logprobs[t] - row.ref_logprobs[t])
            kls[-1] += difference
            value = float(values[row.sequence_id][t])
            delta = (total if place == 0 else 0.0) - 0.1 * difference + 0.9 * following - value
            advantage, gain, following = delta + 0.9 * 0.8 * advantage, delta + 0.9 * gain, value
            assert found[row.sequence_id][t] == pytest.approx(advantage, abs=2e-5)
            assert float(targets[row.sequence_id][t]) == pytest.approx(gain + value, abs=2e-5)
    assert kl == pytest.approx(statistics.mean(kls), rel=1e-4)
    for pack in packs:
        assert pack.advantages is not None
        for name, sent in zip(pack.sequence_ids, unpack_response_logprobs(pack, pack.advantages), strict=True):
            assert sent.tolist() == found[name]


def test_a_teacher_adds_to_the_advantage_of_every_token_that_carries_loss(rejects: Rejects) -> None:
    settings, trajectories = config(kl_reward={"coef": 0.1}), batch(SHAPES)
    trainers, packs = one_rank(settings, trajectories)
    for pack in packs:
        pack.teacher_logprobs = pack.ref_logprobs
    expected, gaps, of = [], [], dict[str, list[float]](sums=[], words=[])
    for index, t in enumerate(trajectories):
        t.source = ("sums", "words")[index % 2]
        assert t.old_logprobs is not None and t.ref_logprobs is not None
        pairs = zip(t.ref_logprobs.tolist(), t.old_logprobs.tolist(), strict=True)
        gain = [
            teacher - old if kept else 0.0 for (teacher, old), kept in zip(pairs, t.loss_mask.tolist(), strict=True)
        ]
        expected += [advantage + 0.5 * one for advantage, one in zip(t.advantages.tolist(), gain, strict=True)]
        of[t.source] += [one for one, kept in zip(gain, t.loss_mask.tolist(), strict=True) if kept]
        gaps += [one for one, kept in zip(gain, t.loss_mask.tolist(), strict=True) if kept]
    means = {name: -statistics.mean(each) for name, each in {None: gaps, **of}.items()}
    assert distill(trainers, trajectories, 0.5) == pytest.approx(means, rel=1e-5)
    assert torch.cat([t.advantages for t in trajectories]).tolist() == pytest.approx(expected, rel=1e-5)
    assert torch.cat([pack.advantages for pack in packs]).tolist() == pytest.approx(expected, rel=1e-5)
    for pack in packs:
        pack.teacher_logprobs = None
    with rejects(TrainerError, "no-distillation-logprobs"):
        distill(trainers, trajectories, 0.5)


def test_advantages_over_the_mean_importance_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks receive the weighted mean of ``min(pi_old / pi_engine, 1.1)``; advantages stay as they are."""
    settings = config(importance={"correction": "truncate", "high": 1.1, "normalize": True})
    trajectories = batch(SHAPES)
    trainers, packs = one_rank(settings, trajectories)
    total = count = 0.0
    for t in trajectories:
        assert t.old_logprobs is not None and t.logprobs is not None
        for ratio in (t.old_logprobs - t.logprobs)[t.loss_mask].exp().tolist():
            total += t.token_weight * min(ratio, 1.1)
            count += t.token_weight
    before = torch.cat([pack.advantages for pack in packs])
    normalize_importance(settings.algorithm, trainers, trajectories)
    assert torch.cat([pack.mean_weights for pack in packs]).tolist() == pytest.approx(
        [total / count] * len(before), rel=1e-5
    )
    assert torch.equal(torch.cat([pack.advantages for pack in packs]), before) and abs(total / count - 1) > 0.01
    (tmp_path / "own_corrections.py").write_text("def boom(*given):\n    raise ValueError('boom')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = config(importance={"correction": "own_corrections:boom", "normalize": True})
    with pytest.raises(TrainerError, match=r"boom failed with ValueError: boom \(.*own_corrections.py:2\)") as caught:
        normalize_importance(broken.algorithm, trainers, trajectories)
    assert caught.value.code == "custom-loss-failed"
