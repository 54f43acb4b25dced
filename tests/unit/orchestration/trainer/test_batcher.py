"""Batches and windows: nothing is dropped, minibatches hold whole groups, and all replicas have equal counts.

The windows of a step have the sequences, weights and denominator of the whole batch, in any order of arrival.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_like.algorithms import LossInputs, PolicyTerms
from slime_like.algorithms.losses.surrogates import PolicyGradient
from slime_like.config import RunConfig
from slime_like.errors import ConfigError, DataError
from slime_like.orchestration.trainer.batcher import ExperienceBatcher, Window, WindowStream, bundles_of, split_by_group
from slime_like.planning.checks import largest_batch_bytes, object_store_notes
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory
from tests.support.properties import examples
from tests.support.rejections import Rejects
from tests.support.rollout_rows import batcher_of
from tests.unit.checks.checkpoint import write_checkpoint


def trajectory(group: int, index: int, prompt_len: int, response_len: int) -> ScoredTrajectory:
    return ScoredTrajectory.unrewarded(
        f"{group}-{index}", torch.arange(prompt_len), torch.arange(response_len), group_id=group
    )


def batch_of(groups: int, samples: int) -> list[ScoredTrajectory]:
    return [trajectory(g, i, 3 + g % 4, 1 + (g * 7 + i * 3) % 11) for g in range(groups) for i in range(samples)]


def config(**overrides: object) -> RunConfig:
    raw: dict[str, object] = {"run_dir": Path("unused"), "model": {"path": Path("unused")}}
    return RunConfig.model_validate(raw | overrides)


def all_packs(replicas: Iterable[Iterable[Iterable[PackedTrajectory]]]) -> list[PackedTrajectory]:
    return [pack for replica in replicas for minibatch in replica for pack in minibatch]


def carried(packs: Iterable[PackedTrajectory]) -> list[str]:
    """Return the ids of sequences that carry loss."""
    return sorted(name for pack in packs if pack.loss_mask.any() for name in pack.sequence_ids)


@pytest.mark.parametrize("replicas", [1, 3])
def test_sources_go_into_different_packs_of_equal_counts(replicas: int) -> None:
    """Also a source that has fewer sequences than there are replicas."""
    settings, trajectories = config(trainer={"target_tokens_per_batch": 64}), batch_of(9, 4)
    for number, one in enumerate(trajectories):
        one.source = "rare" if number == 5 else ("sums", "words")[number % 2]
    batch = batcher_of(settings, replicas).batch(trajectories, by_source=True)
    assert carried(all_packs(batch.replicas)) == sorted(t.sequence_id for t in trajectories)
    orders = [[pack.source for pack in minibatch] for replica in batch.replicas for minibatch in replica]
    assert set(orders[0]) == {"sums", "words", "rare"} and all(order == orders[0] for order in orders)


def test_minibatches_hold_whole_groups(rejects: Rejects) -> None:
    parts = split_by_group(batch_of(7, 3), 3)
    groups = [{t.group_id for t in part} for part in parts]
    assert [len(part) for part in parts] == [6, 6, 9]
    assert not groups[0] & groups[1] and not groups[1] & groups[2]
    with rejects(DataError, "too-few-groups"):
        split_by_group(batch_of(1, 2), 2)
    fillers = [
        [pack.is_filler for pack in replica[0]] for replica in batcher_of(config(), 3).batch(batch_of(1, 2)).replicas
    ]
    assert fillers == [[False], [False], [True]]  # failures may leave fewer sequences than replicas


def test_balance_by_flops(tmp_path: Path) -> None:
    """A long sequence costs more than its tokens, so balanced FLOPs mean unequal tokens."""
    model = {"path": write_checkpoint(tmp_path, max_position_embeddings=65536)}
    lengths = [20_000] + [1_000] * 40
    trajectories = [trajectory(i, 0, 1, n - 1) for i, n in enumerate(lengths)]
    spread = {}
    for balance in ("tokens", "flops"):
        settings = config(model=model, trainer={"target_tokens_per_batch": 20_000, "balance": balance})
        batch = batcher_of(settings, 2).batch(trajectories)
        shares = [[pack for pack in all_packs([replica]) if pack.loss_mask.any()] for replica in batch.replicas]
        assert carried(shares[0] + shares[1]) == sorted(t.sequence_id for t in trajectories)
        lengths_of = [
            [n for pack in share for n in (pack.prompt_lens + pack.response_lens).tolist()] for share in shares
        ]
        squares = [sum(n * n for n in found) for found in lengths_of]
        tokens = [sum(found) for found in lengths_of]
        spread[balance] = (max(tokens) - min(tokens), max(squares) - min(squares))
    assert spread["tokens"][0] == 0
    assert spread["flops"][0] > 0 and spread["flops"][1] < spread["tokens"][1]


# ----------------------------------------------------------------------------------------------- shared prefixes
def group_of(group: int, samples: int, prompt: int, response: int) -> list[ScoredTrajectory]:
    """Build samples of one prompt whose responses start differently."""
    return [
        ScoredTrajectory.unrewarded(
            f"{group}-{i}", torch.full((prompt,), 100 + group), torch.full((response,), i), group_id=group
        )
        for i in range(samples)
    ]


def sharing(budget: int, replicas: int = 1, share: str = "prompts", **trainer: Any) -> ExperienceBatcher:
    trainer |= {"target_tokens_per_batch": budget, "share_prefixes": share}
    return batcher_of(config(trainer=trainer), replicas)


def computed_tokens(pack: PackedTrajectory) -> int:
    return pack.packed_seq_len - pack.shared_tokens


@pytest.mark.parametrize("share", ["prompts", "tree"])
def test_a_group_is_in_one_pack_and_counts_its_prompt_once(share: str) -> None:
    trajectories = [row for group in range(3) for row in group_of(group, 4, prompt=30, response=5)]
    batch = sharing(100, share=share).batch(trajectories)
    packs = all_packs(batch.replicas)
    assert sorted(len(set(pack.group_ids)) for pack in packs) == [1, 2]
    assert sorted(map(computed_tokens, packs)) == [50, 100]
    assert (batch.tokens.computed, batch.tokens.shared) == (150, 3 * 3 * 30)


def test_a_group_over_the_budget_copies_its_prompt() -> None:
    packs = all_packs(sharing(60).batch(group_of(0, 8, prompt=30, response=10)).replicas)
    assert sorted(map(computed_tokens, packs)) == [50, 60, 60]
    assert carried(packs) == sorted(f"0-{i}" for i in range(8))


def test_groups_are_split_if_a_replica_would_idle() -> None:
    """Two replicas get one group, or three equal groups."""
    for groups, load in ((1, 50), (3, 140)):
        trajectories = [row for group in range(groups) for row in group_of(group, 4, prompt=10, response=20)]
        batch = sharing(200, replicas=2).batch(trajectories)
        found = [sum(computed_tokens(pack) for pack in all_packs([replica])) for replica in batch.replicas]
        assert carried(all_packs(batch.replicas)) == sorted(t.sequence_id for t in trajectories)
        assert found == [load, load]


def test_costs_of_shared_prefixes(tmp_path: Path) -> None:
    """A prompt is computed once, and each response attends to it."""
    settings = config(
        model={"path": write_checkpoint(tmp_path, max_position_embeddings=65536)},
        trainer={"target_tokens_per_batch": 64, "share_prefixes": "prompts", "balance": "flops"},
    )
    batcher = batcher_of(settings, 1)
    (bundle,) = bundles_of(group_of(0, 3, prompt=8, response=4), settings.trainer)
    prompt, whole = batcher._costs([8, 12])
    assert bundle.tokens == 20
    assert bundle.cost(batcher._costs) == pytest.approx(prompt + 3 * (whole - prompt))


# ------------------------------------------------------------------------------------- windows while groups arrive
BUDGET, GROUPS, SAMPLES = 40, 24, 4


def batcher(replicas: int, pipeline: int = 1, reduction: str = "samples") -> ExperienceBatcher:
    trainer = {"target_tokens_per_batch": BUDGET, "parallel": {"pipeline": pipeline}}
    return batcher_of(config(trainer=trainer, algorithm={"reduction": reduction}), replicas)


def arrivals(rows: Sequence[ScoredTrajectory], seed: int) -> list[list[ScoredTrajectory]]:
    """Return whole groups in random order, one to three at a time."""
    generator, groups = random.Random(seed), list(range(GROUPS))
    generator.shuffle(groups)
    parts = []
    while groups:
        taken = [groups.pop() for _ in range(min(len(groups), generator.randint(1, 3)))]
        parts.append([t for t in rows if t.group_id in taken])
    return parts


def sequence_weights(windows: Sequence[Window]) -> dict[str, float]:
    """Return the token weight of every trained sequence. Each must occur once."""
    found: dict[str, float] = {}
    for pack in (pack for window in windows for replica in window for pack in replica if not pack.is_filler):
        for name, weight in zip(pack.sequence_ids, pack.sequence_weights, strict=True):
            assert name not in found
            found[name] = weight
    return found


@pytest.mark.parametrize("reduction", ["tokens", "samples", "groups"])
@pytest.mark.parametrize(
    ("rows", "replicas", "pipeline"),
    [("one", 1, 1), ("one", 2, 1), ("one", 3, 1), ("one", 1, 2), ("one", 2, 2), ("several", 1, 1), ("several", 2, 2)],
)
def test_windows_add_up_to_the_batch(rows: str, replicas: int, pipeline: int, reduction: str) -> None:
    batch = batch_of(GROUPS, SAMPLES) if rows == "one" else rollouts_in_rows(GROUPS, 2)
    expected, whole = weights_by_definition(batch, reduction)
    for seed in range(2 if rows == "one" else 1):
        stream = WindowStream(batcher(replicas, pipeline, reduction))
        early = [window for part in arrivals(batch, seed) if (window := stream.add(part)) is not None]
        last, denominator = stream.finish()
        assert sequence_weights([*early, last]) == pytest.approx(expected, rel=1e-15)
        assert denominator == whole
        assert len(early) >= 1
        for window in (*early, last):
            assert len(window) == replicas and len({len(replica) for replica in window}) == 1
            assert all(pack.packed_seq_len <= BUDGET for replica in window for pack in replica)
        for window in early:
            assert not any(pack.is_filler for replica in window for pack in replica)
            assert pipeline == 1 or (len(window[0]) >= 4 * pipeline and len(window[0]) % pipeline == 0)
        assert stream.tokens.computed == sum(
            pack.packed_seq_len for window in (*early, last) for replica in window for pack in replica
        )


def test_held_groups_are_in_the_next_or_last_window() -> None:
    """Pairs fill a micro-batch of 40. If all groups are held, the last window is the whole batch."""
    stream, groups = WindowStream(batcher(1)), [[trajectory(group, i, 5, 10) for i in range(2)] for group in range(3)]
    assert stream.add(groups[0], holds=True) is None and stream.add(groups[1], holds=True) is None
    window = stream.add([])
    assert window is not None and [pack.sequence_ids for pack in window[0]] == [["0-0", "0-1"]]
    assert stream.add(groups[2], holds=True) is None
    last, denominator = stream.finish()
    assert sorted(name for pack in last[0] for name in pack.sequence_ids) == ["1-0", "1-1", "2-0", "2-1"]
    assert denominator == 6
    held, everything = WindowStream(batcher(1)), [each for group in groups for each in group]
    for group in groups:
        assert held.add(group, holds=True) is None
    whole = batcher(1).batch(everything).replicas[0][0]
    assert [pack.sequence_ids for pack in held.finish()[0][0]] == [pack.sequence_ids for pack in whole]


def test_a_replica_without_a_sequence_gets_a_filler() -> None:
    stream = WindowStream(batcher(2))
    assert stream.add([trajectory(0, i, 5, 30) for i in range(2)]) is None
    assert stream.add([trajectory(1, 0, 5, 30)]) is not None
    last, _ = stream.finish()
    assert [[pack.is_filler for pack in replica] for replica in last] == [[False], [True]]
    stream = WindowStream(batcher(2))
    assert stream.add([trajectory(0, 0, 5, 30)]) is None
    assert [[pack.is_filler for pack in replica] for replica in stream.finish()[0]] == [[False], [True]]


# ------------------------------------------------------------------------------------- rollouts of several rows
def rollouts_in_rows(groups: int, samples: int) -> list[ScoredTrajectory]:
    """Build sample s of group g in 1 + (g + 3 s) % 5 rows of different lengths. A third row carries no loss."""
    rows = []
    for g, s in ((g, s) for g in range(groups) for s in range(samples)):
        for row in range(1 + (g + 3 * s) % 5):
            made = trajectory(g, s, 3 + row, 1 + (g * 7 + row * 5) % 11)
            made.sequence_id, made.rollout_id = f"{g}-{s}.{row}", f"{g}-{s}"
            made.loss_mask[:] = row != 2
            rows.append(made)
    return rows


def weights_by_definition(rows: Sequence[ScoredTrajectory], reduction: str) -> tuple[dict[str, float], float]:
    """Return (weight of every row, denominator) from the sums of rollouts and groups."""
    tokens = {row.sequence_id: float(row.loss_mask.sum()) for row in rows}
    of_rollout: dict[str, float] = {}
    of_group: dict[int, float] = {}
    for row in rows:
        of_rollout[row.rollout_id] = of_rollout.get(row.rollout_id, 0) + tokens[row.sequence_id]
        of_group[row.group_id] = of_group.get(row.group_id, 0) + tokens[row.sequence_id]
    if reduction == "groups":
        return {r.sequence_id: 1 / of_group[r.group_id] if tokens[r.sequence_id] else 0.0 for r in rows}, len(of_group)
    if reduction == "samples":
        weights = {r.sequence_id: 1 / of_rollout[r.rollout_id] if tokens[r.sequence_id] else 0.0 for r in rows}
        return weights, len(of_rollout)
    return {name: 1.0 if count else 0.0 for name, count in tokens.items()}, sum(tokens.values())


@pytest.mark.parametrize("reduction", ["tokens", "samples", "groups"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_uneven_rows_over_replicas(replicas: int, minibatches: int, reduction: str) -> None:
    """Every row is trained once. Minibatches and weights are of whole rollouts, even if packs split them."""
    algorithm = {"minibatches": minibatches, "reduction": reduction}
    settings = config(algorithm=algorithm, trainer={"target_tokens_per_batch": BUDGET})
    batch = batcher_of(settings, replicas).batch(rollouts_in_rows(8, 3))
    seen: set[str] = set()
    for step, minibatch in enumerate(split_by_group(rollouts_in_rows(8, 3), minibatches)):
        packs = [pack for replica in batch.replicas for pack in replica[step]]
        assert len({len(replica[step]) for replica in batch.replicas}) == 1
        assert all(pack.packed_seq_len <= BUDGET for pack in packs)
        weights, denominator = weights_by_definition(minibatch, reduction)
        window = [list(replica[step]) for replica in batch.replicas]
        assert sequence_weights([window]) == pytest.approx(weights, rel=1e-15)
        assert batch.denominators[step] == denominator
        rollouts = {name for pack in packs for name in pack.rollout_ids}
        assert rollouts == {row.rollout_id for row in minibatch} and not rollouts & seen
        seen |= rollouts
        holders = [{name for pack in packs for name in pack.rollout_ids} for packs in window]
        assert replicas == 1 or any(one & other for one, other in pairwise(holders))


PER_SEQUENCE = {
    "loss": {"loss": "gspo"},
    "level": {"importance": {"correction": "mask", "level": "geometric"}},
    "veto": {"importance": {"correction": "mask", "veto": 1e-4}},
    "mask": {"off_policy_mask": 0.1},
    "custom": {"loss": "tests.unit.orchestration.trainer.test_batcher:Undeclared"},
    "custom, nowhere": {"loss": "tests.unit.orchestration.trainer.test_batcher:Nowhere"},
}


class Undeclared:
    """Custom loss that does not declare what it needs."""

    name, needs_old, needs_advantages = "undeclared", False, False

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        return PolicyTerms(-inputs.logprobs)


class PerToken(PolicyGradient):
    """Custom loss that is computed per token."""

    per_sequence = False


@pytest.mark.parametrize("algorithm", PER_SEQUENCE.values(), ids=PER_SEQUENCE)
def test_ratios_per_sequence_are_rejected_for_several_rows(algorithm: dict[str, Any], rejects: Rejects) -> None:
    made = batcher_of(config(algorithm=algorithm), 1)
    assert made.batch(batch_of(2, 2)).denominators == [sum(t.response_len for t in batch_of(2, 2))]
    with rejects(ConfigError, "several-rows"):
        made.batch(rollouts_in_rows(2, 2))
    batcher_of(config(algorithm={"loss": f"{__name__}:PerToken"}), 1).batch(rollouts_in_rows(2, 2))


@examples(40)
@given(seed=st.integers(0, 2**32), share=st.sampled_from(["prompts", "tree"]), replicas=st.integers(1, 3))
def test_packs_of_any_rows_keep_the_budget(seed: int, share: str, replicas: int) -> None:
    """Sequences in a pack share at least as many tokens as the batcher counted."""
    pick = random.Random(seed)
    rows: list[ScoredTrajectory] = []
    for index in range(pick.randint(replicas, 14)):
        begun, group = [0], pick.randint(0, 2)
        if rows and pick.random() < 0.7:
            earlier = pick.choice(rows)
            every = [*earlier.prompt_tokens.tolist(), *earlier.response_tokens.tolist()]
            begun, group = every[: pick.randint(1, len(every))], earlier.group_id
        tokens = [*begun[:55], *(pick.randint(0, 2) for _ in range(pick.randint(1, 9)))]
        cut = pick.randint(1, len(tokens) - 1)
        parts = torch.tensor(tokens[:cut]), torch.tensor(tokens[cut:])
        rows.append(ScoredTrajectory.unrewarded(f"{group}-{index}", *parts, group_id=group))
    packs = all_packs(sharing(64, replicas, share).batch(rows).replicas)
    assert carried(packs) == sorted(row.sequence_id for row in rows)
    assert all(computed_tokens(pack) <= 64 for pack in packs)


def test_a_plan_counts_the_bytes_of_packs() -> None:
    """The batch has the longest sequences without padding, scored by the reference and the trainer."""
    rollout = {"prompts_per_step": 3, "samples_per_prompt": 2, "max_new_tokens": 56}
    settings = config(
        rollout=rollout, data={"max_prompt_tokens": 40}, algorithm={"kl": {"coef": 0.1}, "minibatches": 3},
        trainer={"target_tokens_per_batch": 96},
    )  # fmt: skip
    batch = [trajectory(group, index, 40, 56) for group in range(3) for index in range(2)]
    for each in batch:
        each.logprobs = each.ref_logprobs = each.old_logprobs = torch.zeros(56)
        each.weight_versions = torch.zeros(56, dtype=torch.int64)
    packs = all_packs(batcher_of(settings, 1).batch(batch).replicas)
    values = [getattr(pack, field.name) for pack in packs for field in fields(pack)]
    per_token = [value for value in values if isinstance(value, torch.Tensor) and len(value) in (56, 96)]
    assert largest_batch_bytes(settings) == sum(tensor.nbytes for tensor in per_token)
    assert not list(object_store_notes(settings.cluster, largest_batch_bytes(settings)))
    longer = config(rollout=rollout | {"max_new_tokens": 10**7})
    (note,) = object_store_notes(longer.cluster, largest_batch_bytes(longer))
    assert "2.79 GiB" in note and "2862" in note  # 6 x 10**7 x 50 bytes
