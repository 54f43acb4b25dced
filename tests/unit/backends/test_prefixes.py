"""Micro-batches: shared prefixes give the values of copies, and packs move to the device in one copy."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from backends.common.attention.kernels import Segments
from backends.common.attention.packed_attention import LocalAttention
from backends.common.process.rendezvous import fake_world
from backends.common.step.packs import on_device, require_computable
from slime_like.algorithms.packing import prefixes
from slime_like.algorithms.packing.pack import pack_sequences, real_tokens, unpack_sequences
from slime_like.algorithms.packing.prefixes import Sharing
from slime_like.errors import TrainerError
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory
from tests.parallel.tiny import scored_sequences
from tests.support.prefixes import VOCAB, SmallModel, check_gradients, group_of_four, row
from tests.support.properties import examples


@pytest.fixture(scope="module")
def model() -> SmallModel:
    return SmallModel()


@st.composite
def _trees(draw: Callable[..., Any]) -> list[ScoredTrajectory]:
    """Draw rows of one or two groups, each new or a continuation of a part of an earlier row."""
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=9)
    rows: list[tuple[int, list[int]]] = []
    found = []
    for index in range(draw(st.integers(1, 8))):
        group, begun = draw(st.integers(0, 1)), []
        if rows and draw(st.booleans()):
            group, earlier = draw(st.sampled_from(rows))
            begun = earlier[: draw(st.integers(1, len(earlier)))]
        every = begun + draw(tokens if len(begun) < 2 else st.just([]) | tokens)
        every = every if len(every) > 1 else [*every, 0]
        cut = draw(st.integers(1, len(every) - 1))
        rows.append((group, every))
        found.append(row(index, group, every[:cut], every[cut:]))
    return found


def _check(model: SmallModel, rows: list[ScoredTrajectory], sharing: Sharing) -> tuple[int, int]:
    """Return the tokens computed without and with sharing."""
    pack = pack_sequences(rows, sharing=sharing)
    expected, found = model.check_scores(rows, sharing)
    check_gradients(expected, found)
    assert found.tokens == real_tokens([pack])
    for unpacked, given_row in zip(unpack_sequences(pack), rows, strict=True):
        assert torch.equal(unpacked.prompt_tokens, given_row.prompt_tokens)
        assert torch.equal(unpacked.response_tokens, given_row.response_tokens)
    return expected.tokens, found.tokens


@examples(25)
@given(rows=_trees(), sharing=st.sampled_from(["prompts", "tree"]), worth=st.sampled_from([1, 4]))
def test_values_and_gradients_equal_those_of_copies(
    rows: list[ScoredTrajectory], sharing: Sharing, worth: int, model: SmallModel
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "_WORTH", worth)
        patch.setattr(prefixes, "_READERS", VOCAB)  # share even if the rest is longer
        _check(model, rows, sharing)


def test_the_tree_of_known_rows(model: SmallModel) -> None:
    assert _check(model, group_of_four(), "prompts") == (37, 22)
    every = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    rows = [row(i, 0, every[:cut], every[cut : cut + 3]) for i, cut in enumerate((2, 5, 7))]
    assert _check(model, rows, "tree") == (23, 10)
    assert pack_sequences(rows, sharing="tree").segment_lengths is not None
    assert _check(model, rows, "prompts") == (23, 23)
    # Two rollouts continue one prompt, and three rows continue the history of the first one.
    first, second = [1, 2, 3, 4, 5, 6], [1, 2, 3, 9]
    rows = [row(0, 0, first[:3], first[3:]), row(1, 0, second[:3], second[3:])]
    rows += [row(2 + i, 0, [*first, 7], [i, 8]) for i in range(3)]
    assert _check(model, rows, "tree") == (37, 3 + 3 + 1 + 6 + 1)
    pack = pack_sequences(rows, sharing="tree")
    assert pack.segment_parents is not None and pack.segment_parents.tolist() == [-1, 0, 1, 1, 1, 0]
    rows = [row(i, 0, [1, 2], [3] * length) for i, length in enumerate((4, 10, 11, 9))]
    pack = pack_sequences(rows, sharing="prompts")
    assert pack.segment_lengths is not None and sorted(pack.segment_lengths.tolist()) == [2, 4, 9, 10, 13]
    with pytest.raises(ValueError, match="is unknown"):
        pack_sequences(group_of_four(), sharing="groups")  # type: ignore[arg-type]


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
