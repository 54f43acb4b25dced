"""A micro-batch is checked on the host and moves to the device in one copy."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from backends.common.attention.kernels import Segments
from backends.common.attention.packed_attention import LocalAttention
from backends.common.process.rendezvous import fake_world
from backends.common.step.packs import on_device, require_computable
from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.errors import TrainerError
from slime_like.trajectory import PackedTrajectory
from tests.parallel.tiny import scored_sequences

META = torch.device("meta")


@dataclass
class Part:
    pack: PackedTrajectory
    boundaries: Tensor
    attention: LocalAttention | None


class _Copies(TorchDispatchMode):
    """Record whether each copy between devices is non-blocking."""

    def __init__(self) -> None:
        super().__init__()
        self.non_blocking: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            self.non_blocking.append(options.get("non_blocking", False))
        return func(*args, **options)


def test_everything_moves_in_one_copy_and_keeps_its_identity() -> None:
    pack = pack_sequences(scored_sequences([(3, 4), (2, 5)]))
    attention = LocalAttention(Segments.of(pack.cu_seqlens))
    given = Part(pack, pack.cu_seqlens, attention), attention.segments, None
    with _Copies() as copies:
        part, segments, nothing = on_device(given, META)
    assert copies.non_blocking == [True] and nothing is None
    assert part.boundaries is part.pack.cu_seqlens and part.boundaries.is_meta
    assert part.attention is not None and part.attention.segments.device is segments.device
    assert segments.host == attention.segments.host == (0, 7, 14)
    assert part.pack.sequence_ids is pack.sequence_ids and part.pack.tokens.shape == (14,)
    assert pack.tokens.device.type == "cpu"


def test_tensors_on_the_device_are_not_copied() -> None:
    pack = pack_sequences(scored_sequences([(3, 4)]))
    assert on_device(pack, torch.device("cpu")) is pack
    pack.old_logprobs = torch.zeros(4, device=META)  # from an earlier pass
    assert on_device(pack, META).old_logprobs is pack.old_logprobs
    assert on_device((), META) == () and on_device(Segments((0, 1), torch.zeros(2, device=META), 1), META).longest == 1


@pytest.fixture
def pack() -> PackedTrajectory:
    return pack_sequences(scored_sequences([(3, 4), (2, 5)]), target_tokens_per_batch=20, pad_token_id=5)


@pytest.mark.parametrize(("place", "named"), [(8, "sequence 's1' "), (16, "pad_token_id=200 ")])
def test_a_token_outside_the_vocabulary_is_rejected(place: int, named: str, pack: PackedTrajectory) -> None:
    require_computable(pack, 200)
    pack.tokens[place] = 200
    with fake_world(0, 1, torch.distributed.destroy_process_group), pytest.raises(TrainerError) as caught:
        require_computable(pack, 200)
    assert caught.value.code == "token-outside-vocabulary" and named in str(caught.value)


@pytest.mark.parametrize(("name", "wrong"), [("temperatures", [1.0, 0.0]), ("response_lens", [4, 4])])
def test_temperatures_and_lengths_are_checked(name: str, wrong: list[float], pack: PackedTrajectory) -> None:
    with pytest.raises(ValueError):
        require_computable(replace(pack, **{name: torch.tensor(wrong)}), 200)
