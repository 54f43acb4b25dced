"""Buckets of random weights, a session for their senders, and what is left of either."""

import contextlib
import uuid
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import WeightBucket
from slime_like.weights.transports.names import SHARED_MEMORY, cleanup
from tests.support.rejections import Rejects


@pytest.fixture
def session() -> Iterator[str]:
    """A name that no other test uses; nothing of it is left in shared memory at the end."""
    name = f"transport-test-{uuid.uuid4().hex}"
    yield name
    assert cleanup(name) == []


def bucket(seed: int, elements: int = 1000) -> WeightBucket:
    """Three tensors: one of this size, an empty one, and one of another type and of an odd size."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(elements, generator=generator)
    return WeightBucket([(f"{seed}.a", values), (f"{seed}.b", torch.empty(0)), (f"{seed}.c", values[:7].half())])


def left(session: str) -> list[str]:
    return [path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith(session)]


def require_received(received: Iterable[tuple[str, Tensor]], sent: WeightBucket) -> None:
    for (name, tensor), (sent_name, expected) in zip(received, sent.tensors, strict=True):
        assert (name, tensor.dtype, tensor.shape) == (sent_name, expected.dtype, expected.shape)
        assert torch.equal(tensor, expected)


@contextlib.contextmanager
def refused(code: str) -> Iterator[None]:
    """Require an error of this code."""
    with Rejects()(WeightSyncError, code):
        yield
