"""Prefixes that sequences of a group share: a pack as a tree of segments, each computed once.

A pack always holds whole sequences. Where they share prefixes, three further tensors say which tokens are computed:
segments lie end to end, each behind the one that it continues and in front of all that continues it. A token's hidden
state depends on nothing behind it, so that all sequences read the same one, and their gradients add up.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from slime_like.algorithms.packing.layout import Array, PackLengths
from slime_like.trajectory import PackedTrajectory, Trajectory

Sharing = Literal["prompts", "tree"]

_WORTH = 32
"""Tokens that sequences have in common, beyond a prompt's or a sequence's end, from which they are cut there."""

_READERS = 5
"""Tokens behind a prefix, per token of it, above which merging attention costs more than the prefix does."""


class Segment(NamedTuple):
    """Tokens ``[start, end)`` of the sequence ``row``, and of all others that pass through it or end in it."""

    parent: int
    row: int
    start: int
    end: int


def overlaps(sequences: Sequence[Trajectory], sharing: Sharing | None) -> tuple[list[int], list[int]]:
    """The order in which each sequence shares most with the one before it, and how many tokens each then shares.

    Args:
        sequences: any; only those of one group share.
        sharing: "prompts": equal prompts as a whole; "tree": whatever two sequences begin with; ``None``: nothing.

    Raises:
        ValueError: another name.
    """
    if sharing not in (None, *get_args(Sharing)):
        raise ValueError(f"sharing={sharing!r} is unknown; use 'prompts', 'tree' or None")
    order = list(range(len(sequences)))
    if sharing is None:
        return order, [0] * len(order)
    tokens = [_tokens(sequence, sharing) for sequence in sequences]
    keys = [(sequence.group_id, each.tobytes()) for sequence, each in zip(sequences, tokens, strict=True)]
    # Always in the same order, so that a part of the sequences shares no less than it does among all of them.
    order.sort(key=lambda index: (keys[index], sequences[index].total_len, sequences[index].sequence_id))
    shared = [0]
    for before, after in pairwise(order):
        if keys[before][0] != keys[after][0]:
            common = 0
        elif sharing == "prompts":
            common = len(tokens[after]) if keys[before] == keys[after] else 0
        else:
            common = _cut(sequences[before], sequences[after], _common(tokens[before], tokens[after]))
        shared.append(common if pays(common, sequences[after].total_len - common) else 0)
    return order, shared


def _cut(one: Trajectory, other: Trajectory, common: int) -> int:
    """Where sequences with so many tokens in common part: where one of them or a prompt ends, if hardly later."""
    natural = max((end for end in (one.prompt_len, one.total_len, other.prompt_len) if end <= common), default=0)
    return common if common - natural >= _WORTH else natural


def pays(prefix: float, rest: float) -> bool:
    """Return whether a sequence that goes on by ``rest`` tokens costs less if it shares the prefix."""
    return _READERS * prefix >= rest


def segments_of(lengths: Sequence[int], shared: Sequence[int]) -> tuple[list[Segment], list[list[int]]]:
    """Segments of sequences in the order of ``overlaps``, parents first, and the segments of every sequence.

    Where sequences part, each part is a segment of its own. One that others only go on from ends inside of theirs.
    """
    segments: list[Segment] = []
    paths: list[list[int]] = [[] for _ in lengths]
    waiting = [(0, len(lengths), 0, -1)]
    while waiting:  # the last first: all that continues a segment follows it at once
        first, last, start, parent = waiting.pop()
        row, end, parts = _until_they_part(lengths, shared, first, last)
        if end > start:
            for path in paths[first:last]:
                path.append(len(segments))
            segments.append(Segment(parent, row, start, end))
            parent = len(segments) - 1
        waiting += [(*part, end, parent) for part in reversed(parts)]
    return segments, paths


def _until_they_part(
    lengths: Sequence[int], shared: Sequence[int], first: int, last: int
) -> tuple[int, int, list[tuple[int, int]]]:
    """Of sequences ``[first, last)``: one that has all they have in common, how long that is, and how they go on."""
    while last - first > 1:
        common = min(shared[first + 1 : last])
        cuts = [first, *(row for row in range(first + 1, last) if shared[row] == common), last]
        parts = [(a, b) for a, b in pairwise(cuts) if b - a > 1 or lengths[a] > common]
        if len(parts) != 1:
            return first, common, parts
        ((first, last),) = parts
    return first, lengths[first], []


def tree(sequences: Sequence[Trajectory], lengths: PackLengths, sharing: Sharing | None) -> dict[str, Tensor]:
    """The fields ``segment_...`` of a pack; none where nothing is shared."""
    order, shared = overlaps(sequences, sharing)
    if not any(shared):
        return {}
    segments, paths = segments_of([int(lengths.total[row]) for row in order], shared)
    sizes = [segment.end - segment.start for segment in segments]
    begins = list(accumulate(sizes, initial=0))
    places = np.empty(lengths.actual, np.int64)
    for row, path in zip(order, paths, strict=True):
        sequence = places[lengths.starts[row] : lengths.ends[row]]
        for number in path:
            part = sequence[segments[number].start : segments[number].end]
            part[:] = np.arange(begins[number], begins[number] + len(part))
    parents = [segment.parent for segment in segments]
    return {
        "segment_parents": torch.tensor(parents),
        "segment_lengths": torch.tensor(sizes),
        "segment_places": torch.from_numpy(places),
    }


def segment_sources(packed: PackedTrajectory) -> Tensor:
    """(sum of the segments,) int64: the first of the pack's tokens that each of the segments' tokens stands for."""
    assert packed.segment_places is not None and packed.segment_lengths is not None
    tokens = torch.arange(packed.actual_total_tokens, device=packed.segment_places.device)
    sources = tokens.new_full((int(packed.segment_lengths.sum()),), packed.actual_total_tokens)
    return sources.scatter_reduce(0, packed.segment_places, tokens, "amin")


def tree_of_tokens(packed: PackedTrajectory) -> tuple[Tensor, Tensor]:
    """Trees of a pack that shares prefixes: which one each token of the pack belongs to, and their sizes."""
    parents, lengths, places = packed.segment_parents, packed.segment_lengths, packed.segment_places
    assert parents is not None and lengths is not None and places is not None
    trees = (parents < 0).cumsum(0) - 1
    sizes = lengths.new_zeros(int(trees[-1]) + 1).index_add(0, trees, lengths)
    return trees.repeat_interleave(lengths)[places], sizes


def _tokens(sequence: Trajectory, sharing: Sharing) -> Array:
    """What is compared. Bytes with the highest first are in the order of the numbers."""
    parts = [sequence.prompt_tokens, sequence.response_tokens][: 1 if sharing == "prompts" else 2]
    return np.concatenate([part.numpy() for part in parts]).astype(">i8")


def _common(one: Array, other: Array) -> int:
    """Tokens that both begin with."""
    shorter = min(len(one), len(other))
    differ = one[:shorter] != other[:shorter]
    return int(differ.argmax()) if differ.any() else shorter
