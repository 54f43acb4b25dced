"""Memory: host copies, offloaded activations, and segments that expand."""

import gc
import io
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.common.process.rendezvous import allocator_problems, use_expandable_segments
from backends.common.trainer.host_memory import HostCopies, HostMemory, HostOffload, HostPool
from backends.megatron import activations
from backends.megatron.activations import ActivationOffload, OffloadedTensor
from rollout.sglang.arguments import memory_saver_problem
from slime_like.config import RunConfig
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


def test_pieces_have_their_own_bytes() -> None:
    one, _ = HostCopies().of([torch.ones(3), torch.ones(100_000)])
    file = io.BytesIO()
    torch.save(one, file)
    assert one.untyped_storage().nbytes() == 12 and len(file.getvalue()) < 4096
    pool = HostPool(1024)
    large, small = pool.take(5000), pool.take(100)
    assert (large.nbytes, small.nbytes, _held(pool)) == (5000, 100, 5120 + 1024)
    address = large.data_ptr()
    del large
    assert pool.take(4000).data_ptr() == address and _held(pool) == 5120 + 1024


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


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> Locked:
    locked = Locked()
    locked.use(monkeypatch)
    return locked


def _used(number: int) -> tuple[tuple[HostOffload, HostCopies, HostPool], list[Tensor]]:
    """Use each kind of host memory of a trainer; return the holders, and views of the memory."""
    memory, copies, pool = HostOffload(), HostCopies(), HostPool(1 << 12)
    memory.offload([torch.ones(1000), torch.ones(100)])
    made = copies.of([torch.full((700,), float(number))])
    made += copies.of([torch.full((7000,), float(number))])
    pieces = [pool.take(nbytes).fill_(number) for nbytes in (100, 5000)]
    return (memory, copies, pool), [made[-1][-10:], *(piece[-10:] for piece in pieces)]


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
    (memory, copies, pool), _ = _used(1)
    for holder in (memory, copies, pool):
        holder.close()
        holder.close()
    kept = torch.arange(5.0)
    memory.offload([kept])
    memory.restore()
    assert torch.equal(kept, torch.arange(5.0)) and len(locked.ranges) == 1


def test_pages_are_not_shared(locked: Locked) -> None:
    """Like CUDA, the stand-in rejects a page that is locked already."""
    small = [HostMemory(100) for _ in range(3)]
    (address, _), *_ = locked.ranges.items()
    assert len(locked.ranges) == len(small) and locked.cudaHostRegister(address, 100, 1) == 712


def test_memory_that_cuda_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = Locked(error=2)
    refusing.use(monkeypatch)
    with pytest.raises(RuntimeError, match="cudaHostRegister: CUDA error 2"):
        HostMemory(100)


SIZE = 64


class Logged(ActivationOffload):
    """Offload that logs fetched and taken tensors by their number in the forward pass."""

    def __init__(self) -> None:
        super().__init__([], HostPool())
        self.log: list[str] = []

    def _fetch(self, saved: OffloadedTensor) -> Tensor:
        self.log.append(f"fetch {_number(saved)}")
        return super()._fetch(saved)

    def _to_device(self, saved: Tensor | OffloadedTensor) -> Tensor:
        tensor = super()._to_device(saved)
        assert isinstance(saved, OffloadedTensor) and saved.fetched is None
        self.log.append(f"take {_number(saved)}")
        return tensor


def _chain(x: Tensor) -> Tensor:
    for _ in range(5):
        x = torch.sigmoid(x)  # saves its result
    return x


def _number(saved: OffloadedTensor) -> int:
    return 0 if saved.before is None else 1 + _number(saved.before)


def test_the_tensors_needed_next_are_fetched_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(activations, "AHEAD_BYTES", 2 * SIZE * 4)
    offload = Logged()
    for _ in range(2):  # the second forward pass must not fetch tensors of the first one
        x = torch.linspace(-2, 1, SIZE, requires_grad=True)
        with offload.saving():
            y = _chain(x)
        y.sum().backward()
        ahead = ["fetch 4", "fetch 3", "fetch 2", "take 4", "fetch 1", "take 3", "fetch 0"]
        assert offload.log == [*ahead, "take 2", "take 1", "take 0"]
        offload.log.clear()
        plain = x.detach().requires_grad_()
        _chain(plain).sum().backward()
        assert torch.equal(x.grad, plain.grad)


ALONE = {"cluster": {"placement": "colocated"}}  # one engine on the only rank's device: auto is colocated
BESIDE: dict[str, Any] = {}
OURS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def _config(**sections: Any) -> RunConfig:
    return RunConfig(run_dir=Path("run"), model={"path": "model"}, **sections)


@pytest.mark.parametrize(
    ("sections", "environment", "expandable", "rejected"),
    [
        (BESIDE, {}, True, False),
        (ALONE, {}, False, False),
        (ALONE | {"sync": {"transport": "shared_memory"}}, {}, True, False),
        (ALONE | {"sync": {"transport": "colocated"}}, {}, False, False),
        (ALONE | {"algorithm": {"loss": "sft"}}, {}, True, False),
        (ALONE, OURS, False, True),
        (ALONE | {"sync": {"transport": "shared_memory"}}, OURS, False, False),
        (BESIDE, OURS, False, False),  # the user's setting stays
        (BESIDE, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, False, False),
    ],
)
def test_segments_expand_unless_engines_map_them(
    sections: dict[str, Any],
    environment: dict[str, str],
    expandable: bool,
    rejected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    config = _config(**sections)
    mapped, transport = config.engines_map_memory, config.sync.transport
    use_expandable_segments(mapped, environment)
    assert settings == ["expandable_segments:True"] * expandable
    problems = list(allocator_problems(transport, mapped, environment))
    assert [OURS.items() <= environment.items() for _ in problems] == [True] * rejected


@pytest.mark.parametrize(("sections", "rejected"), [(ALONE, True), (BESIDE, False)])
def test_sglangs_memory_saver_rejects_expandable_segments(sections: dict[str, Any], rejected: bool) -> None:
    config = _config(**sections)
    problem = memory_saver_problem(config.rollout, config.cluster, OURS)
    assert (problem is not None) is rejected
    assert not rejected or "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in str(problem)
    assert memory_saver_problem(config.rollout, config.cluster, {}) is None
