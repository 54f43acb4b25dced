"""Every layout computes logprobs, entropies, loss and gradients over the supports of truncated samples.

Compared as in ``test_parity`` and ``test_fsdp_parity``, within the same bounds, with the float64 reference on whole
sequences, also for packs that share prefixes: shared rows are read with each sequence's own supports. Supports have one
to nine tokens; every fifth token was sampled from the whole vocabulary. Not covered: CUDA.
"""

import math
from pathlib import Path

import pytest
import torch

from slime_like.trajectory import ScoredTrajectory
from tests.parallel.parity import MASKED, PACKS, Case, Settings, case_of, check_everything, run_case
from tests.parallel.shared_prefixes import shared_case, sharing_sequences
from tests.parallel.test_fsdp_parity import check_case, run_cases
from tests.parallel.tiny import VOCAB, scored_sequences

WIDTH = 9
LAYOUTS: dict[str, Settings] = {
    "single": {},
    "tp2-sp": {"tensor": 2, "sequence": True},
    "pp2-recompute": {"pipeline": 2, "recompute": "full"},
    "cp2": {"context": 2},
    "cp2-allgather": {"context": 2, "attention": "allgather"},
}


def with_supports(sequence: ScoredTrajectory, generator: torch.Generator) -> ScoredTrajectory:
    supports = list[torch.Tensor]()
    for number, token in enumerate(sequence.response_tokens.tolist()):
        kept = []
        if number % 5 != 4:
            count = int(torch.randint(0, WIDTH, (), generator=generator))
            others = torch.randint(0, VOCAB, (count,), generator=generator).tolist()
            kept = [token, *(other for other in dict.fromkeys(others) if other != token)]
        order = torch.randperm(len(kept), generator=generator)
        supports.append(torch.tensor(kept, dtype=torch.int32)[order])
    sequence.support_ids = torch.cat(supports)
    sequence.support_sizes = torch.tensor(list(map(len, supports)), dtype=torch.int32)
    counts = sequence.support_sizes  # a token sampled from fewer is likelier; ratios stay near 1
    likelier = torch.where(counts > 0, math.log(VOCAB) - counts.clamp_min(1).log(), 0.0)
    assert sequence.old_logprobs is not None and sequence.ref_logprobs is not None
    sequence.old_logprobs, sequence.ref_logprobs = sequence.old_logprobs + likelier, sequence.ref_logprobs + likelier
    return sequence


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    generator = torch.Generator().manual_seed(0)
    sequences = scored_sequences([pair for pack in PACKS for pair in pack], fully_masked=MASKED)
    return case_of(
        [with_supports(one, generator) for one in sequences], "qwen3", tmp_path_factory.mktemp("qwen3"), 1, layers=2
    )


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Case:
    generator = torch.Generator().manual_seed(1)
    sequences = [with_supports(one, generator) for one in sharing_sequences()]
    return shared_case("qwen3", tmp_path_factory.mktemp("sharing"), 1, sequences=sequences)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_use_the_supports(name: str, case: Case, tmp_path: Path) -> None:
    check_everything(case, run_case(case, LAYOUTS[name], tmp_path, steps=1))


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "cp2"])
def test_shared_prefixes_use_the_supports_of_each_sequence(name: str, sharing: Case, tmp_path: Path) -> None:
    settings = {**LAYOUTS[name], "share_prefixes": "tree"}
    check_everything(sharing, run_case(sharing, settings, tmp_path, steps=1))


@pytest.mark.parametrize("shares", [False, "tree"])
@pytest.mark.parametrize("layout", [{}, {"data": 2, "context": 2}], ids=["single", "dp2-cp2"])
def test_fsdp_uses_the_supports(
    layout: Settings, shares: bool | str, case: Case, sharing: Case, tmp_path: Path
) -> None:
    case = sharing if shares else case
    (results,) = run_cases([case], {**layout, "share_prefixes": shares}, tmp_path, steps=1)
    check_case(case, results)
