"""Host memory is reused for copies of any tensors, which are no larger in a file than they are."""

import gc
import io
import random

import pytest
import torch
from torch import Tensor

from backends.common.trainer.host_memory import HostCopies, HostMemory, HostPool, Parking
from tests.support.locked import Locked


def _held(pool: HostPool) -> int:
    """Return all bytes held, even while no piece is in use."""
    return sum(segment.memory.nbytes for segment in pool._segments)


def test_copies_reuse_the_memory() -> None:
    copies = HostCopies()
    sources = [
        torch.arange(5.0),
        torch.tensor(3, dtype=torch.int64),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.empty(0),
        torch.arange(6.0, dtype=torch.float64).view(2, 3).t(),
        torch.arange(10)[4:7],
    ]
    made = copies.of(sources)
    places = [copy.data_ptr() for copy in made]
    for copy, source in zip(made, sources, strict=True):
        assert copy.dtype == source.dtype and torch.equal(copy, source)
    sources[0][:] = 7.0
    assert torch.equal(made[0], torch.arange(5.0))
    again = copies.of(sources)
    assert [copy.data_ptr() for copy in again] == places and torch.equal(made[0], sources[0])
    (wide,) = copies.of([torch.full((4000,), 2.0)])
    assert torch.equal(wide, torch.full((4000,), 2.0))


def test_a_copy_is_written_without_its_neighbors() -> None:
    one, _ = HostCopies().of([torch.ones(3), torch.ones(100_000)])
    file = io.BytesIO()
    torch.save(one, file)
    assert one.untyped_storage().nbytes() == 12 and len(file.getvalue()) < 4096


def test_pieces_in_use_never_overlap_and_dropped_ones_are_reused() -> None:
    """Pieces are taken and dropped at random. Each keeps its values, even if only a view is left."""
    draw, pool, held = random.Random(0), HostPool(1 << 16), {}
    for number in range(500):
        if len(held) > 8:
            del held[draw.choice(list(held))]
        nbytes = draw.choice([1, 511, 512, 513, 4096, 10_000])
        held[number] = pool.take(nbytes).fill_(number % 251)[nbytes // 2 :]
        assert all(bool((piece == key % 251).all()) for key, piece in held.items())
    assert _held(pool) <= 2 << 16


def test_a_piece_larger_than_a_segment_has_its_own() -> None:
    pool = HostPool(1024)
    large, small = pool.take(5000), pool.take(100)
    assert (large.nbytes, small.nbytes, _held(pool)) == (5000, 100, 5120 + 1024)
    address = large.data_ptr()
    del large
    assert pool.take(4000).data_ptr() == address and _held(pool) == 5120 + 1024


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> Locked:
    locked = Locked()
    locked.use(monkeypatch)
    return locked


def _used(number: int) -> tuple[tuple[Parking, HostCopies, HostPool], list[Tensor]]:
    """Use each kind of host memory of a trainer; return the holders, and views of the memory."""
    parking, copies, pool = Parking(), HostCopies(), HostPool(1 << 12)
    parking.park([torch.ones(1000), torch.ones(100)])
    made = copies.of([torch.full((700,), float(number))])
    made += copies.of([torch.full((7000,), float(number))])
    pieces = [pool.take(nbytes).fill_(number) for nbytes in (100, 5000)]
    return (parking, copies, pool), [made[-1][-10:], *(piece[-10:] for piece in pieces)]


@pytest.mark.parametrize("closes", [True, False])
def test_memory_is_unlocked_before_it_is_unmapped(closes: bool, locked: Locked) -> None:
    """The memory of the second trainer reuses addresses of the first one's."""
    for number in (1, 2):
        holders, views = _used(number)
        assert len(locked.ranges) == 4 and locked.total == 5 * number  # the larger copies replaced the smaller
        if closes:
            for holder in holders:
                holder.close()
            assert locked.ranges == {}
        del holders
        gc.collect()
        assert len(locked.ranges) == (0 if closes else 3)  # memory with views stays mapped and locked
        assert all(bool((view == number).all()) for view in views)
        del views
        assert locked.ranges == {} and locked.late == []


def test_memory_can_be_used_again_after_closing(locked: Locked) -> None:
    (parking, copies, pool), _ = _used(1)
    for holder in (parking, copies, pool):
        holder.close()
        holder.close()
    kept = torch.arange(5.0)
    parking.park([kept])
    parking.restore()
    assert torch.equal(kept, torch.arange(5.0)) and len(locked.ranges) == 1


def test_memory_that_cuda_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = Locked(error=2)
    refusing.use(monkeypatch)
    with pytest.raises(RuntimeError, match="cudaHostRegister: CUDA error 2"):
        HostMemory(100)


def test_pages_are_not_shared(locked: Locked) -> None:
    """Like CUDA, the stand-in rejects a page that is locked already."""
    small = [HostMemory(100) for _ in range(3)]
    (address, _), *_ = locked.ranges.items()
    assert len(locked.ranges) == len(small) and locked.cudaHostRegister(address, 100, 1) == 712
