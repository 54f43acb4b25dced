"""Batches: nothing dropped, whole groups per minibatch, one denominator per optimizer step, equal counts everywhere.

A step's windows while its groups arrive: the sequences, weights and denominator of the whole batch, whatever the order,
and full micro-batches in every window but the last.
"""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch

from slime_like.config import RunConfig
from slime_like.errors import DataError
from slime_like.orchestration.trainer.batcher import ExperienceBatcher, Window, WindowStream, split_by_group
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory
from tests.support.rejections import Rejects
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
    """Sequences that carry loss."""
    return sorted(name for pack in packs if pack.loss_mask.any() for name in pack.sequence_ids)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_every_sequence_is_trained_once_and_counts_are_equal(replicas: int, minibatches: int) -> None:
    settings = config(algorithm={"minibatches": minibatches}, trainer={"target_tokens_per_batch": 64})
    trajectories = batch_of(9, 4)
    batch = ExperienceBatcher(settings, replicas, pad_token_id=0).batch(trajectories)
    for minibatch in range(minibatches):
        assert len({len(replica[minibatch]) for replica in batch.replicas}) == 1
    packs = all_packs(batch.replicas)
    assert carried(packs) == sorted(t.sequence_id for t in trajectories)
    assert all(pack.packed_seq_len <= 64 for pack in packs)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("tokens", sum(t.response_len for t in batch_of(4, 3))), ("samples", 12), ("groups", 4)],
)
def test_the_denominator_covers_the_whole_optimizer_step(reduction: str, expected: float) -> None:
    settings = config(algorithm={"reduction": reduction}, trainer={"target_tokens_per_batch": 32})
    batch = ExperienceBatcher(settings, 2, pad_token_id=0).batch(batch_of(4, 3))
    assert batch.denominators == [pytest.approx(expected)]


def test_minibatches_hold_whole_groups() -> None:
    parts = split_by_group(batch_of(7, 3), 3)
    groups = [{t.group_id for t in part} for part in parts]
    assert [len(part) for part in parts] == [6, 6, 9]
    assert not groups[0] & groups[1] and not groups[1] & groups[2]


def test_too_few_sequences_are_refused_with_a_remedy(rejects: Rejects) -> None:
    with rejects(DataError, "too-few-sequences"):
        ExperienceBatcher(config(), 3, pad_token_id=0).batch(batch_of(1, 2))
    with rejects(DataError, "too-few-groups"):
        split_by_group(batch_of(1, 2), 2)


def test_balance_by_flops(tmp_path: Path) -> None:
    """One long sequence is as much work as more tokens of short ones: replicas differ in tokens, less in FLOPs."""
    model = {"path": write_checkpoint(tmp_path, max_position_embeddings=65536)}
    lengths = [20_000] + [1_000] * 40
    trajectories = [trajectory(i, 0, 1, n - 1) for i, n in enumerate(lengths)]
    spread = {}
    for balance in ("tokens", "flops"):
        settings = config(model=model, trainer={"target_tokens_per_batch": 20_000, "balance": balance})
        batch = ExperienceBatcher(settings, 2, pad_token_id=0).batch(trajectories)
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


# ------------------------------------------------------------------------------------- windows while groups arrive
BUDGET, GROUPS, SAMPLES = 40, 24, 4


def batcher(replicas: int, pipeline: int = 1, reduction: str = "samples") -> ExperienceBatcher:
    trainer = {"target_tokens_per_batch": BUDGET, "parallel": {"pipeline": pipeline}}
    return ExperienceBatcher(config(trainer=trainer, algorithm={"reduction": reduction}), replicas, pad_token_id=0)


def arrivals(seed: int) -> list[list[ScoredTrajectory]]:
    """Whole groups, one to three at a time, in any order."""
    generator, groups = random.Random(seed), list(range(GROUPS))
    generator.shuffle(groups)
    by_group = {g: [t for t in batch_of(GROUPS, SAMPLES) if t.group_id == g] for g in groups}
    parts = []
    while groups:
        taken = [groups.pop() for _ in range(min(len(groups), generator.randint(1, 3)))]
        parts.append([t for g in taken for t in by_group[g]])
    return parts


def sequence_weights(windows: Sequence[Window]) -> dict[str, float]:
    """Token weight of every sequence that is trained; each once."""
    found: dict[str, float] = {}
    for pack in (pack for window in windows for replica in window for pack in replica if not pack.is_filler):
        for name, weight in zip(pack.sequence_ids, pack.sequence_weights, strict=True):
            assert name not in found
            found[name] = weight
    return found


@pytest.mark.parametrize("reduction", ["tokens", "samples", "groups"])
@pytest.mark.parametrize(("replicas", "pipeline"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)])
def test_windows_add_up_to_the_batch(replicas: int, pipeline: int, reduction: str) -> None:
    whole = batcher(replicas, pipeline, reduction).batch(batch_of(GROUPS, SAMPLES))
    expected = sequence_weights([[minibatch for replica in whole.replicas for minibatch in replica]])
    for seed in range(3):
        stream = WindowStream(batcher(replicas, pipeline, reduction))
        early = [window for part in arrivals(seed) if (window := stream.add(part)) is not None]
        last, denominator = stream.finish()
        assert sequence_weights([*early, last]) == expected
        assert denominator == whole.denominators[0]
        assert len(early) >= 1
        for window in (*early, last):
            assert len(window) == replicas and len({len(replica) for replica in window}) == 1
            assert all(pack.packed_seq_len <= BUDGET for replica in window for pack in replica)
        for window in early:
            assert not any(pack.is_filler for replica in window for pack in replica)
            assert pipeline == 1 or (len(window[0]) >= 4 * pipeline and len(window[0]) % pipeline == 0)
        assert stream.packed_tokens == sum(
            pack.packed_seq_len for window in (*early, last) for replica in window for pack in replica
        )


def test_spare_sequences_are_carried_over() -> None:
    """Three of 15 tokens: two fill a micro-batch of 40 so that the third does not fit; it opens the next one."""
    stream = WindowStream(batcher(1))
    assert stream.add([trajectory(0, i, 5, 10) for i in range(2)]) is None
    window = stream.add([trajectory(1, 0, 5, 10)])
    assert window is not None and [pack.sequence_ids for pack in window[0]] == [["0-0", "0-1"]]
    last, denominator = stream.finish()
    assert [pack.sequence_ids for pack in last[0]] == [["1-0"]] and denominator == 3


def test_the_last_window_may_leave_replicas_without_samples_only_if_they_have_had_some(rejects: Rejects) -> None:
    stream = WindowStream(batcher(2))
    assert stream.add([trajectory(0, i, 5, 30) for i in range(2)]) is None
    assert stream.add([trajectory(1, 0, 5, 30)]) is not None
    last, _ = stream.finish()
    assert [[pack.is_filler for pack in replica] for replica in last] == [[False], [True]]
    stream = WindowStream(batcher(2))
    assert stream.add([trajectory(0, 0, 5, 30)]) is None
    with rejects(DataError, "too-few-sequences"):
        stream.finish()


def test_a_sequence_over_the_budget_is_named_as_it_arrives(rejects: Rejects) -> None:
    with rejects(DataError):
        WindowStream(batcher(1)).add([trajectory(0, 0, 11, 30)])
