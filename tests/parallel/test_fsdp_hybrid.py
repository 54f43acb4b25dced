"""Gated delta nets in packs, with FSDP: every sequence is computed as transformers computes it alone, in float64.

Sequences are shorter than the convolution, end around a chunk's end, or have several chunks. With context ranks, one
spans the ranks, and others end inside a rank's part.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.linear_attention import Recurrence
from slime_like.algorithms.context import Layout, split_for_context_parallel
from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.config import RunConfig
from slime_like.interfaces import RankPlacement
from slime_like.trajectory import PackedTrajectory
from tests.parallel.parity import BALANCE, Case, Settings, case_of, fsdp_config
from tests.parallel.ranks import run_ranks
from tests.parallel.steps import running
from tests.parallel.test_fsdp_parity import check_case, run_cases
from tests.parallel.tiny import scored_sequences

FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LENGTHS = [[(1, 1), (1, 2), (40, 23), (2, 62), (9, 56)], [(70, 75), (3, 30)]]
LAYOUTS: dict[str, Settings] = {"recomputed": {"recompute": "full"}, "cp2": {"context": 2}}


@dataclass
class HybridCase(Case):
    """A case with packs of ``LENGTHS``."""

    def packs(self) -> list[PackedTrajectory]:
        sizes = [len(lengths) for lengths in LENGTHS]
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        return [pack_sequences(self.sequences[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def hybrid_case(family: str, directory: Path, steps: int = 2) -> HybridCase:
    sequences = scored_sequences([pair for lengths in LENGTHS for pair in lengths])
    return HybridCase(**vars(case_of(sequences, family, directory, steps, BALANCE.get(family, 0.0), layers=2)))


@pytest.fixture(scope="module")
def hybrid_cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    return [hybrid_case(family, tmp_path_factory.mktemp(family)) for family in FAMILIES]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_family_computes_the_reference(layout: str, hybrid_cases: list[Case], tmp_path: Path) -> None:
    for case, results in zip(hybrid_cases, run_cases(hybrid_cases, LAYOUTS[layout], tmp_path), strict=True):
        check_case(case, results)


@pytest.mark.parametrize("context", [1, 2])
def test_a_neighbor_changes_no_bit(context: int, hybrid_cases: list[Case], tmp_path: Path) -> None:
    """The sequence before and the one after are unchanged. Another one, of the same length, spans the ranks."""
    case, neighbor = hybrid_cases[1], 3
    config = fsdp_config(case, tmp_path, {"context": context}, "bfloat16")
    others = list(case.sequences[: len(LENGTHS[0])])
    given = others[neighbor]
    others[neighbor] = replace(
        given, prompt_tokens=given.prompt_tokens + 1, response_tokens=given.response_tokens.flip(0)
    )
    packs = [case.packs()[0], pack_sequences(others)]
    for one, other in run_ranks(_scores, context, tmp_path / "ranks", config, packs):
        parts = [scores.split([pair[1] for pair in LENGTHS[0]]) for scores in (one, other)]
        for index, (ours, theirs) in enumerate(zip(*parts, strict=True)):
            assert torch.equal(ours, theirs) is (index != neighbor)


def _scores(placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory]) -> list[Tensor]:
    with running(placement, config, scores=True) as trainer:
        return [scores["old_logprobs"] for scores in trainer.score(packs)]


def test_context_ranks_share_heads_in_both_layouts(tmp_path: Path) -> None:
    pack = pack_sequences(scored_sequences(LENGTHS[0]))
    (alone,) = run_ranks(_mixed, 1, tmp_path / "1", pack)
    shared = run_ranks(_mixed, 2, tmp_path / "2", pack)
    for layout, expected in alone.items():
        for of_one, *parts in zip(expected, *(found[layout] for found in shared), strict=True):
            torch.testing.assert_close(sum(parts), of_one, rtol=0, atol=1e-11)


def _mixed(placement: RankPlacement, pack: PackedTrajectory) -> dict[str, list[Tensor]]:
    """Return this rank's outputs, among zeros for all tokens, and its part of all gradients, by layout."""
    address = f"tcp://{placement.master_address}:{placement.master_port}"
    dist.init_process_group("gloo", init_method=address, rank=placement.rank, world_size=placement.world_size)
    assert dist.group.WORLD is not None
    found = {}
    for layout in get_args(Layout):
        generator = torch.Generator().manual_seed(0)
        tokens, shapes = len(pack.tokens), ((2, 8), (2, 8), (4, 6), (4,), (4,))
        shapes_of_parameters = (2 * 2 * 8 + 4 * 6, 4), (4,), (4,)
        leaves = [
            torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
            for shape in (*((tokens, *shape) for shape in shapes), *shapes_of_parameters)
        ]
        shard = split_for_context_parallel(pack, placement.world_size, placement.rank, layout)
        real = (shard.source >= 0).nonzero()[:, 0]
        local = [x[shard.source.clamp_min(0)] for x in leaves[:5]]  # padding has values that must not matter
        out = Recurrence.of(shard, dist.group.WORLD).mix(*local, *leaves[5:])
        whole = out.new_zeros(tokens, *out.shape[1:]).index_copy(0, shard.source[real], out[real])
        grad = torch.randn(whole.shape, generator=generator, dtype=whole.dtype)
        found[layout] = [whole.detach(), *torch.autograd.grad(whole, leaves, grad)]
    return found
