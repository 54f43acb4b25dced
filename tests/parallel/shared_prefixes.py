"""Sequences that share prefixes, for comparisons with the float64 reference on whole sequences."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch

from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.algorithms.packing.prefixes import Sharing
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory
from tests.parallel.parity import Case, case_of
from tests.parallel.tiny import scored_sequences

# Sizes of the packs, and of each sequence: (prompt, response) and the sequence whose first tokens are its prompt.
PACKS = (5, 2, 5, 2)
SEQUENCES: list[tuple[int, int, int | None]] = [
    *[(9, 9, None), (9, 1, 0), (9, 6, 0), (9, 6, 0), (3, 5, None)],
    *[(60, 2, None), (60, 3, 5)],
    *[(8, 5, None), (13, 6, 7), (13, 4, 7), (8, 7, 7), (10, 3, 7)],
    *[(7, 3, None), (4, 12, None)],
]
EQUAL, BEGINNING = (2, 3), (1, 0)
"""Pairs of sequences: equal responses; the first's response begins the second's."""


class SharedCase(Case):
    """The packs share prefixes."""

    sharing: Sharing = "tree"

    def packs(self) -> list[PackedTrajectory]:
        parts = torch.arange(len(self.sequences)).split(PACKS)
        return [pack_sequences([self.sequences[i] for i in part], sharing=self.sharing) for part in parts]


class PromptsCase(SharedCase):
    """Equal prompts alone."""

    sharing: Sharing = "prompts"


def sharing_sequences() -> list[ScoredTrajectory]:
    plain = scored_sequences([lengths[:2] for lengths in SEQUENCES], fully_masked=(2, 11))
    found: list[ScoredTrajectory] = []
    for index, (sequence, (prompt, _, earlier)) in enumerate(zip(plain, SEQUENCES, strict=True)):
        tokens = sequence.prompt_tokens
        if earlier is not None:
            tokens = torch.cat([found[earlier].prompt_tokens, found[earlier].response_tokens])[:prompt]
        group = sum(start <= index for start in (0, 4, 5, 7, 12, 13))
        found.append(replace(sequence, prompt_tokens=tokens, group_id=group))
    for index, other in (EQUAL, BEGINNING):
        found[index].response_tokens = found[other].response_tokens[: found[index].response_len]
    return found


def shared_case(
    family: str,
    directory: Path,
    steps: int,
    kind: type[Case] = SharedCase,
    sequences: Sequence[ScoredTrajectory] = (),
) -> Case:
    """The reference's step on the sequences (default: ``sharing_sequences()``), whole, and packs that share."""
    case = case_of(list(sequences) or sharing_sequences(), family, directory, steps)
    case.expected = replace(case.expected, balance=0.0)  # no loss of routers is reported where there is none
    return kind(**{each.name: getattr(case, each.name) for each in fields(case)})
