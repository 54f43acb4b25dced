"""A step's windows while its groups arrive: the sequences, weights and denominator of the whole batch, whatever the
order, and full micro-batches in every window but the last."""

import random
from collections.abc import Sequence

import pytest

from slime_like.errors import DataError
from slime_like.orchestration.trainer.batcher import ExperienceBatcher, Window, WindowStream
from slime_like.trajectory import ScoredTrajectory
from tests.support.rejections import Rejects
from tests.unit.orchestration.trainer.test_batcher import batch_of, config, trajectory

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


def weights(windows: Sequence[Window]) -> dict[str, float]:
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
    expected = weights([[minibatch for replica in whole.replicas for minibatch in replica]])
    for seed in range(3):
        stream = WindowStream(batcher(replicas, pipeline, reduction))
        early = [window for part in arrivals(seed) if (window := stream.add(part)) is not None]
        last, denominator = stream.finish()
        assert weights([*early, last]) == expected
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
