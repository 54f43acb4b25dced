"""Overlapped communication gives the same weights bit for bit, and is in flight when it should be.

The parity matrix (``test_parity.py``) covers that every layout stays right with it.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.config import RunConfig
from slime_like.interfaces import RankPlacement
from slime_like.trajectory import PackedTrajectory
from tests.parallel.cases import parity_config
from tests.parallel.ranks import run_each
from tests.parallel.steps import exported_from, running, same_bits, weights_of
from tests.parallel.tiny import scored_sequences

BUCKET = 20_000  # parameters: several messages even for a tiny model


@dataclass
class Observed:
    """One rank's observations.

    Attributes:
        sums_under_way: gradient sums in flight after the last window of every step.
        late_weights: number of weights still in flight after an update.
        exported: by Hugging Face name, right after the update.
        weights: this rank's, after all communication.
    """

    sums_under_way: list[int]
    late_weights: int
    exported: dict[str, Tensor]
    weights: list[Tensor]


def _train(placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory]) -> Observed:
    """Do four steps: two as in the loop, an abandoned one, and one whose last window is not announced."""
    with running(placement, config) as trainer:
        mine, under_way = packs[trainer.coordinates.data :: 2], []
        for announced, finished in ((True, True), (True, True), (True, False), (False, True)):
            trainer.begin_step()
            trainer.accumulate(mine[:1])
            trainer.accumulate(mine[1:], last=announced)
            groups = [group for chunk in trainer.wrapped for group in chunk.bucket_groups]
            under_way.append(sum(group.grad_reduce_handle is not None for group in groups))
            if finished:
                trainer.finish_step(5.0)
        before, exported, weights = weights_of(trainer), exported_from(trainer), weights_of(trainer)
    late = sum(not torch.equal(a, b) for a, b in zip(before, weights, strict=True))
    return Observed(under_way, late, exported, weights)


@pytest.mark.parametrize("distributed", [False, True])
def test_overlap_changes_no_bit(distributed: bool, qwen3: Path, tmp_path: Path) -> None:
    packs = [pack_sequences(scored_sequences([(5, 9), (3, 1)], seed=seed)) for seed in range(4)]
    tasks = []
    for overlap in (False, True):
        layout = {"data": 2, "distributed": distributed, "overlap": overlap, "overlap_bucket_params": BUCKET}
        # No clipping: buckets decide which rank sums which part of the gradient norm, and so change its last bit.
        config = parity_config(qwen3, tmp_path, layout | {"clip_grad": 1e9})
        tasks.append((config, packs))
    for plain, overlapped in zip(*run_each(_train, 2, tmp_path / "ranks", tasks), strict=True):
        assert plain.sums_under_way == [0, 0, 0, 0] and plain.late_weights == 0
        # Megatron learns in the first step which weights get gradients, and so when a bucket is full.
        first, second, abandoned, untold = overlapped.sums_under_way
        assert first == untold == 0 and second == abandoned > 1
        assert (overlapped.late_weights > 0) == distributed
        same_bits(overlapped.exported, plain.exported)
        assert all(torch.equal(a, b) for a, b in zip(plain.weights, overlapped.weights, strict=True))
