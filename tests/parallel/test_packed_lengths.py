"""Megatron's newest families in packs: every sequence is computed as transformers computes it alone, in float64.

The pack has sequences of 2, 3, 63, 64 and 65 tokens, and one token of padding. With two context ranks, gathered
attention has the ranks' border inside the fourth sequence, and the ring spreads every sequence over both. A second
pack differs only in the tokens of the fourth sequence, which changes no bit of the other logprobs.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.trajectory import PackedTrajectory
from tests.parallel.layouts import layout_of
from tests.parallel.parity import (
    BALANCE,
    Case,
    case_of,
    check_exported_gradients,
    check_gradients,
    check_scores,
    task_of,
)
from tests.parallel.ranks import run_by_size
from tests.parallel.steps import scored_packs, train_rank
from tests.parallel.tiny import scored_sequences

LENGTHS = [(1, 1), (1, 2), (40, 23), (2, 62), (9, 56)]
CHANGED = 3
LAYOUTS = {
    "glm4_moe": ("single", "cp2", "cp2-allgather"),
    "gpt_oss": ("single", "cp2"),
    "gemma3": ("single", "cp2"),
    "mistral": ("single", "cp2"),
}
"""Without a name, attention over ranks is the ring, and for windows the all-gather."""


@dataclass
class NeighborCase(Case):
    """A case with two packs of ``LENGTHS``."""

    def packs(self) -> list[PackedTrajectory]:
        budget = sum(map(sum, LENGTHS)) + 1
        parts = self.sequences[: len(LENGTHS)], self.sequences[len(LENGTHS) :]
        return [pack_sequences(part, target_tokens_per_batch=budget) for part in parts]


def neighbor_case(family: str, directory: Path) -> NeighborCase:
    sequences = scored_sequences(LENGTHS)
    neighbor, others = sequences[CHANGED], list(sequences)
    others[CHANGED] = replace(
        neighbor, prompt_tokens=neighbor.prompt_tokens.flip(0), response_tokens=neighbor.response_tokens.flip(0)
    )
    case = case_of([*sequences, *others], family, directory, 0, BALANCE.get(family, 0.0), layers=2)
    return NeighborCase(**vars(case))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NeighborCase]:
    return {family: neighbor_case(family, tmp_path_factory.mktemp(family)) for family in LAYOUTS}


@pytest.fixture(scope="module")
def results(made: dict[str, NeighborCase], tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("ranks")
    tasks = {
        (family, layout): task_of(made[family], layout_of(layout), directory, steps=0)
        for family, layouts in LAYOUTS.items()
        for layout in layouts
    }
    return run_by_size(train_rank, directory, tasks)


@pytest.mark.parametrize(
    ("family", "layout"), [(family, layout) for family, layouts in LAYOUTS.items() for layout in layouts]
)
def test_a_pack_computes_the_reference(family: str, layout: str, made: dict[str, NeighborCase], results: Any) -> None:
    case, found = made[family], results[family, layout]
    check_scores(case, found)
    check_gradients(case, found)
    check_exported_gradients(case, found)
    scores = scored_packs(found)
    for one, other in zip(scores[0], scores[1], strict=True):
        parts = (each["old_logprobs"].split([response for _, response in LENGTHS]) for each in (one, other))
        same = [torch.equal(*pair) for pair in zip(*parts, strict=True)]
        assert same == [index != CHANGED for index in range(len(LENGTHS))]
