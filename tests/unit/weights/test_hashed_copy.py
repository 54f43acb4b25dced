"""Copying and hashing in one pass: the copy is whole, and the hash that of the library over the bytes asked for."""

import numpy as np
import pytest
import torch
from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import TensorEntry
from slime_like.weights import checksums
from slime_like.weights.checksums import copy_hashed
from slime_like.weights.received import Arrivals
from tests.support.rejections import Rejects
from tests.unit.weights.formula import CHUNK, reference

BLOCK = 16 * CHUNK


def noise(*shape: int) -> Tensor:
    return torch.randint(-100, 100, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + CHUNK + 5])
@pytest.mark.parametrize("of_target", [False, True])
def test_bytes_and_hash(nbytes: int, of_target: bool) -> None:
    source, target = noise(nbytes), torch.zeros(nbytes, dtype=torch.int8)
    found, hash_s = copy_hashed(source, target, of_target)
    assert found == reference(source.numpy().tobytes())
    assert torch.equal(source, target)
    assert (hash_s > 0) == (nbytes > 0)


@pytest.mark.parametrize("of_target", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_target_of_another_kind(dtype: torch.dtype, of_target: bool) -> None:
    """Another dtype, and a part of a wider matrix."""
    source, wide = noise(700, 30).bfloat16(), torch.zeros(700, 60, dtype=dtype)
    target = wide[:, :30]
    hashed = target if of_target else source
    found, _ = copy_hashed(source, target, of_target)
    assert found == reference(hashed.contiguous().view(torch.uint8).numpy().tobytes())
    assert torch.equal(target.float(), source.float()) and not wide[:, 30:].any()


def test_a_target_of_another_shape_is_refused() -> None:
    with pytest.raises(RuntimeError, match="size"):
        copy_hashed(noise(6, 4), torch.zeros(4, 6, dtype=torch.int8))


@pytest.mark.parametrize("of_target", [False, True])
def test_a_copy_that_fails(monkeypatch: pytest.MonkeyPatch, of_target: bool) -> None:
    """The target's hash tells, in any block; the source's says what was to be copied."""
    source, target = noise(2 * BLOCK), torch.zeros(2 * BLOCK, dtype=torch.int8)
    copyto = np.copyto

    def wrong(into: np.ndarray, block: np.ndarray) -> None:
        copyto(into, block)
        if np.shares_memory(block, source[BLOCK:].numpy()):
            into[[7, 9]] = into[[9, 7]]

    source[BLOCK + 7] = source[BLOCK + 9] + 1
    monkeypatch.setattr(checksums.np, "copyto", wrong)
    found, _ = copy_hashed(source, target, of_target)
    assert (found != reference(source.numpy().tobytes())) == of_target


def test_arrivals_hand_out_nothing_of_a_damaged_bucket(rejects: Rejects) -> None:
    sent = {name: noise(size) for name, size in (("first", 100), ("second", BLOCK + 3))}
    entries = [entry(name, tensor) for name, tensor in sent.items()]
    arrivals = Arrivals()
    copies = arrivals.copies(entries, sent.items(), "cpu")
    assert arrivals.checksums == {each.name: each.checksum for each in entries}
    for name, copy in copies:
        assert torch.equal(copy, sent[name]) and copy.data_ptr() != sent[name].data_ptr()
    sent["second"][-1] += 1
    with rejects(WeightSyncError, "damaged-tensor"):
        Arrivals().copies(entries, sent.items(), "cpu")


def test_arrivals_load_what_was_sent_and_report_damage(rejects: Rejects) -> None:
    sent = {"only": noise(1000)}
    entries, model = [entry("only", sent["only"])], {"only": torch.zeros(1000)}
    Arrivals().load(entries, sent.items(), model.__getitem__)
    assert torch.equal(model["only"], sent["only"].float())
    sent["only"][[3, 4]] = sent["only"][[4, 3]]
    assert sent["only"][3] != sent["only"][4]
    with rejects(WeightSyncError, "damaged-tensor"):
        Arrivals().load(entries, sent.items(), model.__getitem__)


def entry(name: str, tensor: Tensor) -> TensorEntry:
    data = tensor.numpy().tobytes()
    return TensorEntry(name, "int8", tuple(tensor.shape), 0, len(data), reference(data))
