"""Activations that a pipeline stage keeps, against the known counts of 1F1B and interleaved schedules."""

from collections import Counter

import pytest

from backends.megatron.planning.passes import WINDOWS_OF_STAGES, PassMemory, schedule, window_peak


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_1f1b_keeps_one_micro_batch_per_stage_that_follows(stages: int) -> None:
    """The first stage keeps as many as there are stages (Narayanan et al., arXiv:2104.04473, section 2.2.1)."""
    for stage in range(stages):
        peak = window_peak(stage, stages, [PassMemory(saved=10, forward=12, backward=15, head_backward=3)])
        assert peak.in_flight == stages - stage
        assert (peak.nbytes, peak.head) == (10 * (stages - stage - 1) + 15, 3)


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 2), (4, 4)])
def test_every_chunk_runs_every_micro_batch_once_forward_then_once_backward(stages: int, chunks: int) -> None:
    for stage in range(stages):
        passes = list(schedule(stage, stages, chunks))
        runs = Counter(passes)
        assert len(runs) == 2 * chunks and set(runs.values()) == {WINDOWS_OF_STAGES * stages}
        live = Counter()
        for direction, chunk in passes:
            live[chunk] += 1 if direction == "forward" else -1
            assert live[chunk] >= 0


def test_interleaving_keeps_more_on_the_first_stage() -> None:
    """Warm-up is (p - 1) * 2 + (v - 1) * p chunk passes, then one more before the first backward."""
    chunk = PassMemory(saved=1, forward=1, backward=1)
    assert window_peak(0, 4, [chunk, chunk]).in_flight == (4 - 1) * 2 + 4 + 1
    assert window_peak(3, 4, [chunk, chunk]).in_flight == 4 + 1
