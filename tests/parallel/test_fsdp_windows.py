"""Sliding windows and sinks in packs, with FSDP over two context ranks.

Sequences of 2, 3, 63, 64, 65 and more tokens, one across the ranks, are computed as transformers computes each one
alone in float64. Other tokens in a neighbor change no bit.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from backends.fsdp.trainer import FsdpTrainer
from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.config import RunConfig
from slime_like.interfaces import RankPlacement
from slime_like.trajectory import PackedTrajectory
from tests.parallel.parity import fsdp_config
from tests.parallel.ranks import run_each
from tests.parallel.test_fsdp_hybrid import LENGTHS, hybrid_case
from tests.parallel.test_fsdp_parity import check_case, run_cases

FAMILIES = ("gpt_oss", "gemma3_text")
LAYOUT = {"context": 2}


def _logprobs(placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory]) -> list[Tensor]:
    trainer = FsdpTrainer(config, placement)
    trainer.setup()
    found = [logprobs for logprobs, *_ in trainer._score(packs)]
    trainer.shutdown()
    return found


def test_packs_compute_the_reference(tmp_path: Path) -> None:
    cases = [hybrid_case(family, tmp_path / family) for family in FAMILIES]
    for case, results in zip(cases, run_cases(cases, LAYOUT, tmp_path), strict=True):
        check_case(case, results)
    tasks = []
    for case in cases:
        sequences = case.sequences[: len(LENGTHS[0])]
        changed = replace(sequences[2], response_tokens=sequences[2].response_tokens.flip(0))
        packs = [pack_sequences([*sequences[:2], each, *sequences[3:]]) for each in (sequences[2], changed)]
        tasks.append((fsdp_config(case, tmp_path, LAYOUT), packs))
    sizes = [response for _, response in LENGTHS[0]]
    for ranks in run_each(_logprobs, 2, tmp_path / "neighbors", tasks):
        for one, other in ranks:
            same = [torch.equal(*parts) for parts in zip(one.split(sizes), other.split(sizes), strict=True)]
            assert same == [True, True, False, True, True]
