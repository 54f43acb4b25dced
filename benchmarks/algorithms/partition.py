"""Compare partition quality with the lower bound and plain first-fit-decreasing, and measure its time."""

import math

import torch

from benchmarks.algorithms.measure import Row, best_times
from slime_like.algorithms import partition_by_tokens
from slime_like.algorithms.packing.partition import first_fit_decreasing

NUM_SEQUENCES, BUDGET, LONGEST = 10_000, 8192, 4096


def rows() -> list[Row]:
    """Measure 10,000 sequences with uniform and lognormal lengths up to 4,096, micro-batches of 8,192 tokens."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.randint(16, LONGEST + 1, (NUM_SEQUENCES,), generator=generator).tolist()
    normal = torch.randn(NUM_SEQUENCES, generator=generator)
    lognormal = (normal * 0.8 + math.log(500)).exp().clamp(16, LONGEST).long().tolist()
    return [
        row
        for name, lengths in (("uniform", uniform), ("lognormal", lognormal))
        for ranks in (1, 8, 32)
        for row in _rows(name, lengths, ranks)
    ]


def _rows(name: str, lengths: list[int], ranks: int) -> list[Row]:
    case = f"partition {name}, {ranks} ranks"
    partition = partition_by_tokens(lengths, BUDGET, ranks)
    found = sum(len(batches) for batches in partition)
    greedy = len(first_fit_decreasing(lengths, BUDGET))
    bound = math.ceil(sum(lengths) / BUDGET)
    loads = [sum(lengths[i] for members in batches for i in members) for batches in partition]
    imbalance = max(loads) / (sum(loads) / ranks) - 1
    counts = {len(batches) for batches in partition}
    ms = best_times({case: lambda: partition_by_tokens(lengths, BUDGET, ranks)}, repeats=3)[case]
    equal = "equal counts" if len(counts) == 1 else f"counts {sorted(counts)}"
    more = found / greedy - 1
    note = f"lower bound {bound}, first fit {greedy} ({more:+.2%})"
    return [
        Row(case, "micro-batches", found, "", note, "at most 3 % more than first fit", more <= 0.03),
        Row(case, "rank imbalance", 100 * imbalance, "%", equal, "at most 2 %", imbalance <= 0.02),
        Row(case, "time", ms, "ms", "", "at most 1,000 ms", ms <= 1000.0),
    ]
