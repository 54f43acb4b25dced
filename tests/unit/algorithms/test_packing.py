"""Packing, unpacking and supports of truncated sampling, against layouts and lists written out by plain loops."""

import pickle
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slime_like.algorithms import (
    pack_sequences,
    real_tokens,
    response_logit_index,
    response_tokens,
    unpack_response_logprobs,
    unpack_sequences,
    zero_weight_pack,
)
from slime_like.algorithms.packing.pack import move_together
from slime_like.algorithms.softmax import are_in, pad_supports
from slime_like.interfaces import Supports
from slime_like.trajectory import ScoredTrajectory
from tests.support.properties import examples
from tests.unit.algorithms.cases import PADDINGS, SHAPES, batch, scored, shapes, unscored


def assert_same(left: object, right: object) -> None:
    assert type(left) is type(right)
    for field in fields(left):  # type: ignore[arg-type]
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b), field.name
        else:
            assert a == b, field.name


@pytest.mark.parametrize("absent", [(), ("logprobs",), ("ref_logprobs",), ("old_logprobs",), ("weight_versions",)])
@given(shapes=shapes(), padding=PADDINGS, is_scored=st.booleans())
@examples(20)
def test_round_trip_of_every_field(
    absent: tuple[str, ...], shapes: list[tuple[int, int]], padding: int, is_scored: bool
) -> None:
    make = scored if is_scored else unscored
    changes = dict.fromkeys(name for name in absent if hasattr(make(), name))
    sequences = [replace(make(i, p, r), **changes) for i, (p, r) in enumerate(shapes)]
    packed = pack_sequences(sequences, target_tokens_per_batch=sum(p + r for p, r in shapes) + padding)
    assert all(getattr(packed, name) is None for name in absent)
    for before, after in zip(sequences, unpack_sequences(packed), strict=True):
        assert_same(before, after)


@given(shapes=shapes(12, 40), padding=st.integers(0, 9))
@examples(30)
def test_layout_written_out_by_loops(shapes: list[tuple[int, int]], padding: int) -> None:
    sequences = batch(shapes)
    total = sum(p + r for p, r in shapes)
    packed = pack_sequences(sequences, pad_token_id=7, target_tokens_per_batch=total + padding, ignore_index=-5)
    tokens, positions, response, owner, starts = [], [], [], [], [0]
    targets, weights, advantages, logit_index = [], [], [], []
    for index, s in enumerate(sequences):
        for j, token in enumerate(s.prompt_tokens.tolist() + s.response_tokens.tolist()):
            tokens.append(token)
            positions.append(j)
            response.append(j >= s.prompt_len)
            owner.append(index)
            if j >= s.prompt_len:
                carries = bool(s.loss_mask[j - s.prompt_len])
                targets.append(token if carries else -5)
                weights.append(s.token_weight if carries else 0.0)
                advantages.append(float(s.advantages[j - s.prompt_len]))
                logit_index.append(starts[-1] + j - 1)
        starts.append(len(tokens))
    tokens += [7] * padding
    positions += range(padding)
    response += [False] * padding
    owner += [-1] * padding
    assert packed.tokens.tolist() == tokens
    assert packed.position_ids.tolist() == positions
    assert packed.response_mask.tolist() == response
    assert packed.sequence_mask.tolist() == owner
    assert packed.cu_seqlens.tolist() == starts and packed.cu_seqlens.dtype == torch.int32
    assert packed.sequence_map.tolist() == [[a, b] for a, b in pairwise(starts)]
    assert packed.targets.tolist() == targets
    assert packed.token_weights.tolist() == pytest.approx(weights)
    assert packed.advantages is not None and packed.advantages.tolist() == pytest.approx(advantages)
    assert response_logit_index(packed).tolist() == logit_index
    assert response_tokens(packed).tolist() == [t for s in sequences for t in s.response_tokens.tolist()]
    assert packed.max_seqlen == max(p + r for p, r in shapes)
    assert (packed.packed_seq_len, packed.actual_total_tokens) == (total + padding, total)


def test_padding_belongs_to_no_sequence() -> None:
    """Padding changes no per-response and no per-sequence tensor, and attends only to itself."""
    sequences = batch(SHAPES)
    plain, padded = pack_sequences(sequences), pack_sequences(sequences, target_tokens_per_batch=64)
    for name in ("targets", "loss_mask", "token_weights", "advantages", "response_lens", "cu_seqlens", "sequence_map"):
        assert torch.equal(getattr(plain, name), getattr(padded, name)), name
    total = plain.actual_total_tokens
    assert torch.equal(padded.sequence_mask[:total], plain.sequence_mask) and (padded.sequence_mask[total:] == -1).all()
    with pytest.raises(ValueError, match="not a token id; give one of the vocabulary"):
        pack_sequences(batch(SHAPES), pad_token_id=-1, target_tokens_per_batch=10_000)
    pack_sequences(batch(SHAPES), pad_token_id=-1)  # a tokenizer without padding, and none needed


def test_unpacked_tensors_own_their_memory_and_graph() -> None:
    packed = pack_sequences([scored(i, 200, 300) for i in range(20)])
    one = unpack_sequences(packed)[0]
    assert len(pickle.dumps(one)) < 20_000
    one.response_tokens.zero_()
    assert packed.tokens[200:500].any()
    parts = unpack_response_logprobs(packed, torch.zeros(20 * 300))
    assert parts[0].untyped_storage().nbytes() == 300 * 4
    packed = pack_sequences(batch(SHAPES))
    flat = torch.arange(15.0, requires_grad=True)
    parts = unpack_response_logprobs(packed, flat)
    assert [p.tolist() for p in parts] == [[0, 1, 2, 3], [4], [5, 6], [7, 8, 9, 10, 11, 12, 13], [14]]
    parts[3].sum().backward()
    assert flat.grad is not None and flat.grad.tolist() == [0.0] * 7 + [1.0] * 7 + [0.0]


def test_fillers_carry_no_weight() -> None:
    packed = pack_sequences(batch(SHAPES), target_tokens_per_batch=50)
    filler = zero_weight_pack(packed)
    assert filler.num_sequences == 1 and filler.packed_seq_len == 7
    assert torch.equal(filler.tokens, packed.tokens[:7])
    assert not filler.loss_mask.any() and not filler.token_weights.any()
    assert (filler.targets == packed.ignore_index).all()
    assert filler.is_filler and not packed.is_filler and filler.sequence_weights == [0.0]
    assert real_tokens([packed, filler, packed]) == 2 * packed.actual_total_tokens == 60
    assert filler.old_logprobs is not None and packed.old_logprobs is not None
    assert torch.equal(filler.old_logprobs, packed.old_logprobs[:4])
    packed = pack_sequences([unscored(1), unscored(2)])
    assert_same(unpack_sequences(zero_weight_pack(packed))[0], replace(unscored(1), loss_mask=torch.zeros(4) > 0))


def test_one_buffer_holds_every_tensor() -> None:
    """On the meta device, offsets in the byte buffer can be checked."""
    shapes = {"a": (torch.int32, (3,)), "b": (torch.float32, (5,)), "c": (torch.bool, (1,)), "d": (torch.half, (2, 2))}
    given = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in shapes.items()}
    moved = move_together(given, torch.device("meta"))
    assert {name: (t.dtype, t.shape) for name, t in moved.items()} == shapes
    assert len({t.untyped_storage()._cdata for t in moved.values()}) == 1


def test_the_bytes_of_a_pack_are_pickled_out_of_band_one_buffer_per_tensor() -> None:
    """Ray's memory is shared and read-only, so the receiver gets copies."""
    packed = pack_sequences([scored(i, 200, 300) for i in range(20)])
    tensors = {f.name: t for f in fields(packed) if isinstance(t := getattr(packed, f.name), Tensor)}
    for name, tensor in tensors.items():  # none is a view of another
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
        assert len(pickle.dumps(tensor)) < tensor.nbytes + 1000, name
    assert_same(packed, pickle.loads(pickle.dumps(packed)))
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == len(tensors) and len(pickled) < 10_000
    again = pickle.loads(pickled, buffers=[bytes(buffer) for buffer in buffers])
    assert_same(packed, again)
    again.tokens.zero_()
    assert packed.tokens.any()


NAN, INF = float("nan"), float("inf")


def with_entry(name: str, value: float) -> dict[str, Tensor]:
    """Put ``value`` into the last loss-carrying entry."""
    changed = getattr(scored(1), name).clone()
    changed[2 if changed.numel() == 4 else 1] = value
    return {name: changed, "loss_mask": torch.tensor([True, False, True, False])}


# Changes of one of two sequences, with which training would be a no-op or give NaN.
WRONG_VALUES: list[dict[str, Any]] = [
    *({"temperature": value} for value in (0.0, -1.0, NAN, INF)),
    *({"token_weight": value} for value in (NAN, -0.5)),
    *({"advantages": torch.tensor(value)} for value in (NAN, -INF)),
    *(with_entry(name, x) for name in ("logprobs", "old_logprobs", "ref_logprobs") for x in (NAN, -INF)),
    *(with_entry(name, x) for name in ("rewards", "successes") for x in (NAN, INF)),
    # An ignore_index among the tokens would be scored as 0.
    {"prompt_tokens": torch.tensor([1, 2, -100])},
    {"response_tokens": torch.tensor([1, 2, 3, -100])},
    {"prompt_tokens": torch.zeros(0, dtype=torch.int64), "prompt_len": 0},
    {"prompt_len": 9},
    {"loss_mask": torch.ones(3, dtype=torch.bool)},
]

# Fields that are rejected, by torch or by us.
WRONG_TYPES: list[dict[str, Any]] = [
    *({name: None} for name in ("prompt_tokens", "loss_mask", "rewards", "advantages", "ref_logprobs")),
    {"prompt_tokens": torch.ones(1, 3, dtype=torch.int64)},
    {"response_tokens": torch.ones(4)},
    {"loss_mask": torch.ones(4)},
    {"logprobs": torch.zeros(2, 2)},
    {"rewards": torch.zeros(3)},
    {"successes": torch.zeros(3)},
    {"advantages": torch.zeros(1)},
    *({name: torch.ones(4) > 0} for name in ("response_tokens", "weight_versions")),
]


@pytest.mark.parametrize("changes", WRONG_VALUES + WRONG_TYPES, ids=str)
def test_a_wrong_field_is_not_packed(changes: dict[str, Any]) -> None:
    """A wrong value names its sequence."""
    errors = (AttributeError, RuntimeError, TypeError, ValueError)
    named = any(changes is each for each in WRONG_VALUES)
    with pytest.raises(ValueError if named else errors, match="sequence 's1'" if named else None):
        pack_sequences([scored(0), replace(scored(1), **changes)])


@pytest.mark.parametrize(
    ("sequences", "budget"),
    [
        ([], None),
        ([scored(0), unscored(1)], None),
        ([scored(0), scored(1, 30, 30)], 50),
        ([scored(0), replace(scored(1), sequence_id="s0"), scored(2)], None),
    ],
    ids=["none", "unscored", "too long", "repeated"],
)
def test_sequences_that_cannot_be_packed(sequences: list[Any], budget: int | None) -> None:
    with pytest.raises(ValueError, match=r"sequence.*[;,:] "):
        pack_sequences(sequences, target_tokens_per_batch=budget)


def test_any_iterable_and_any_masked_value_is_packed() -> None:
    sequences = batch(SHAPES)
    assert torch.equal(pack_sequences(s for s in sequences).tokens, pack_sequences(tuple(sequences)).tokens)  # type: ignore[arg-type]
    narrow = [
        replace(s, prompt_tokens=s.prompt_tokens.to(torch.int32), advantages=s.advantages.double()) for s in sequences
    ]
    assert_same(pack_sequences(narrow), pack_sequences(sequences))
    # Includes any values on masked tokens, and finite values with an infinite sum, but no graph.
    masked = torch.tensor([True, True, False, True])
    for value, mask in ((NAN, ~masked), (-INF, ~masked), (-3e38, masked | ~masked)):
        logprobs = scored(1).logprobs.masked_fill(mask, value).requires_grad_()
        sequence = replace(scored(1), loss_mask=masked, logprobs=logprobs, rewards=torch.full((2,), 3e38))
        found = pack_sequences([scored(0), sequence])
        assert found.logprobs[4:].numpy().tobytes() == logprobs.detach().numpy().tobytes()
        assert not found.logprobs.requires_grad and bool(found.rewards.isfinite().all())


ROWS = st.lists(st.lists(st.integers(0, 9), max_size=4, unique=True), min_size=1, max_size=6)


def supports_of(rows: list[list[int]]) -> Supports:
    return Supports.of([np.array(row, np.int64) for row in rows])


def sequence(name: str, rows: list[list[int]]) -> ScoredTrajectory:
    tokens = torch.tensor([row[-1] if row else 3 for row in rows])
    supports = supports_of(rows)
    return replace(
        ScoredTrajectory.unrewarded(name, torch.tensor([1, 2]), tokens),
        support_ids=torch.from_numpy(supports.token_ids),
        support_sizes=torch.from_numpy(supports.sizes),
    )


@given(parts=st.lists(ROWS, min_size=1, max_size=3), cut=st.integers(0, 18), token=st.integers(0, 9))
@examples(30)
def test_supports_are_lists_of_ids(parts: list[list[list[int]]], cut: int, token: int) -> None:
    rows = [row for part in parts for row in part]
    joined = Supports.concatenate([supports_of(part) for part in parts])
    assert [ids.tolist() for ids in joined] == rows and len(joined) == len(rows)
    assert [ids.tolist() for ids in joined.first(cut)] == rows[:cut]
    expected = [not row or token in row for row in rows]
    assert joined.hold(np.full(len(rows), token)).tolist() == expected
    assert [ids.tolist() for ids in Supports.whole(3)] == [[], [], []] and list(Supports.whole(0)) == []


@given(sequences=st.lists(ROWS, min_size=1, max_size=3), picked=st.lists(st.integers(0, 99), max_size=5))
@examples(30)
def test_packs_return_every_sequences_supports(sequences: list[list[list[int]]], picked: list[int]) -> None:
    given_sequences = [sequence(f"s{number}", rows) for number, rows in enumerate(sequences)]
    pack = pack_sequences(given_sequences)
    for before, after in zip(given_sequences, unpack_sequences(pack), strict=True):
        for name in ("support_ids", "support_sizes"):
            assert torch.equal(getattr(before, name), getattr(after, name))  # type: ignore[arg-type]
    rows = [row for part in sequences for row in part]
    tokens = torch.tensor([index % len(rows) for index in picked], dtype=torch.int64)
    assert pack.support_ids is not None and pack.support_sizes is not None
    found = pad_supports(pack.support_ids, pack.support_sizes, tokens)
    assert [[token for token in row if token >= 0] for row in found.tolist()] == [rows[i] for i in tokens.tolist()]
    everything = pad_supports(pack.support_ids, pack.support_sizes, torch.arange(len(rows)))
    asked = torch.full((len(rows),), 4)
    assert are_in(everything, asked).tolist() == [not row or 4 in row for row in rows]
    filler = zero_weight_pack(pack)
    assert filler.support_sizes is not None and filler.support_sizes.tolist() == list(map(len, sequences[0]))
