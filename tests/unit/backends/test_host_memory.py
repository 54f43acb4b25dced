"""Copies in host memory that is used again: of any kind of tensor, and no larger in a file than they are."""

import io

import torch

from backends.common.trainer.host_memory import HostCopies


def test_copies_take_the_same_memory_again() -> None:
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


def test_a_copy_is_written_without_its_neighbours() -> None:
    one, _ = HostCopies().of([torch.ones(3), torch.ones(100_000)])
    file = io.BytesIO()
    torch.save(one, file)
    assert one.untyped_storage().nbytes() == 12 and len(file.getvalue()) < 4096
