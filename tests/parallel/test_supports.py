"""Every layout computes logprobs, entropies, loss and gradients over the supports of truncated samples.

Compared as in ``test_parity`` and ``test_fsdp_parity``, within the same bounds, with the float64 reference on whole
sequences, also for packs that share prefixes: shared rows are read with each sequence's own supports. Supports have one
to nine tokens; every fifth token was sampled from the whole vocabulary. Not covered: CUDA.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_like.trajectory import ScoredTrajectory
from tests.parallel.layouts import layout_of
from tests.parallel.parity import MASKED, PACKS, Case, case_of, check_everything, task_of
from tests.parallel.ranks import run_by_size
from tests.parallel.shared_prefixes import shared_case, sharing_sequences
from tests.parallel.steps import RankResult, train_rank
from tests.parallel.test_fsdp_parity import check_case, run_cases
from tests.parallel.tiny import VOCAB, scored_sequences

WIDTH = 9
PLAIN = ("single", "tp2-sp", "pp2-recompute", "cp2")
SHARING = ("tp2-sp", "pp2-recompute", "cp2-allgather")


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


@pytest.fixture(scope="module")
def results(case: Case, sharing: Case, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[RankResult]]:
    """Return every rank's results by layout and whether packs share prefixes."""
    directory = tmp_path_factory.mktemp("ranks")
    tasks: dict[Any, tuple[Any, ...]] = {(name, False): task_of(case, layout_of(name), directory, 1) for name in PLAIN}
    tasks |= {
        (name, True): task_of(sharing, {**layout_of(name), "share_prefixes": "tree"}, directory, 1) for name in SHARING
    }
    return run_by_size(train_rank, directory, tasks)


@pytest.mark.parametrize(("name", "shares"), [*((name, False) for name in PLAIN), *((name, True) for name in SHARING)])
def test_layouts_use_the_supports_of_each_sequence(
    name: str, shares: bool, case: Case, sharing: Case, results: Any
) -> None:
    check_everything(sharing if shares else case, results[name, shares])


@pytest.mark.parametrize("shares", [False, "tree"])
def test_fsdp_uses_the_supports(shares: bool | str, case: Case, sharing: Case, tmp_path: Path) -> None:
    case = sharing if shares else case
    (results,) = run_cases([case], {"data": 2, "context": 2, "share_prefixes": shares}, tmp_path, steps=1)
    check_case(case, results)
