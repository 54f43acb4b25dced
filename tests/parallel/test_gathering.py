"""Shards of a batch reach the group's first rank as they are, by shared memory and by messages alike."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from backends.megatron.conversion.gathering import open_gather, packed_bytes
from slime_like.interfaces import RankPlacement
from tests.parallel.ranks import run_ranks
from tests.parallel.steps import small_disk

TURNS = 5


def batch(rank: int, turn: int) -> list[Tensor]:
    """Odd sizes and several types; every rank and turn has other values."""
    first = 1000.0 * turn + 100.0 * rank
    return [
        first + torch.arange(7.0),
        (first + torch.arange(6.0)).bfloat16().view(2, 3),
        first + torch.arange(35.0, dtype=torch.float64).view(5, 7).t(),
    ][: 1 + turn % 3]


def _gather_all(placement: RankPlacement, without_memory: int | None) -> list[list[list[Tensor]] | None]:
    address = f"tcp://{placement.master_address}:{placement.master_port}"
    dist.init_process_group("gloo", init_method=address, rank=placement.rank, world_size=placement.world_size)
    group = dist.new_group(list(range(placement.world_size)))
    results = []
    largest = max(packed_bytes(batch(placement.rank, turn)) for turn in range(TURNS))
    with small_disk(0 if placement.rank == without_memory else None):
        gather = open_gather(group, largest, torch.device("cpu"))
    for turn in range(TURNS):
        found = gather(batch(placement.rank, turn))
        time.sleep(0.05 if placement.rank == 0 else 0)  # the others go on with the next turn meanwhile
        results.append(found and [[shard.clone() for shard in shards] for shards in found])
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("without_memory", [None, 1], ids=["shared memory", "messages"])
def test_every_shard_arrives(without_memory: int | None, tmp_path: Path) -> None:
    first, *others = run_ranks(_gather_all, 3, tmp_path, without_memory)
    assert others == [[None] * TURNS] * 2
    for turn, found in enumerate(first):
        expected = [batch(rank, turn) for rank in range(3)]
        assert len(found) == 3
        for ours, theirs in zip(found, expected, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert one.dtype == other.dtype and torch.equal(one, other)


def test_a_group_of_one_moves_nothing() -> None:
    shard = torch.ones(3)
    found = open_gather(None, 64, torch.device("cpu"))([shard])
    assert found is not None and found[0][0].data_ptr() == shard.data_ptr()
