"""Supports of truncated sampling from an engine, in packs and padded for the head, against lists."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_like.algorithms.packing.pack import pack_sequences, unpack_sequences, zero_weight_pack
from slime_like.algorithms.softmax import are_in, padded
from slime_like.interfaces import Supports
from slime_like.trajectory import ScoredTrajectory
from tests.support.properties import examples

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
@examples(60)
def test_supports_are_lists_of_ids(parts: list[list[list[int]]], cut: int, token: int) -> None:
    rows = [row for part in parts for row in part]
    joined = Supports.joined([supports_of(part) for part in parts])
    assert [ids.tolist() for ids in joined] == rows and len(joined) == len(rows)
    assert [ids.tolist() for ids in joined.first(cut)] == rows[:cut]
    expected = [not row or token in row for row in rows]
    assert joined.hold(np.full(len(rows), token)).tolist() == expected
    assert [ids.tolist() for ids in Supports.whole(3)] == [[], [], []] and list(Supports.whole(0)) == []


@given(sequences=st.lists(ROWS, min_size=1, max_size=3), picked=st.lists(st.integers(0, 99), max_size=5))
@examples(60)
def test_packs_return_every_sequences_supports(sequences: list[list[list[int]]], picked: list[int]) -> None:
    given_sequences = [sequence(f"s{number}", rows) for number, rows in enumerate(sequences)]
    pack = pack_sequences(given_sequences)
    for before, after in zip(given_sequences, unpack_sequences(pack), strict=True):
        for name in ("support_ids", "support_sizes"):
            assert torch.equal(getattr(before, name), getattr(after, name))  # type: ignore[arg-type]
    rows = [row for part in sequences for row in part]
    tokens = torch.tensor([index % len(rows) for index in picked], dtype=torch.int64)
    assert pack.support_ids is not None and pack.support_sizes is not None
    found = padded(pack.support_ids, pack.support_sizes, tokens)
    assert [[token for token in row if token >= 0] for row in found.tolist()] == [rows[i] for i in tokens.tolist()]
    everything = padded(pack.support_ids, pack.support_sizes, torch.arange(len(rows)))
    asked = torch.full((len(rows),), 4)
    assert are_in(everything, asked).tolist() == [not row or 4 in row for row in rows]
    filler = zero_weight_pack(pack)
    assert filler.support_sizes is not None and filler.support_sizes.tolist() == list(map(len, sequences[0]))
