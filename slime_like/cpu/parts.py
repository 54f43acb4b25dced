"""Work on rows in as many threads as torch has, for kernels, which have one thread and leave Python's lock."""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import torch

_LEAST_ELEMENTS = 2**17
"""For a thread; for fewer waking one costs more than it does."""


def in_parts(shape: Sequence[int], work: Callable[[int, int], None]) -> None:
    """Call ``work(start, end)`` for neighbouring parts of the rows of an array of ``shape``, and wait for all."""
    rows, parts = shape[0], num_parts(math.prod(shape))
    run_parts([rows * part // parts for part in range(parts + 1)], work)


def num_parts(elements: int) -> int:
    """Threads that such a number of elements is worth."""
    return max(1, min(torch.get_num_threads(), elements // _LEAST_ELEMENTS))


def run_parts(bounds: list[int], work: Callable[[int, int], None]) -> None:
    """Call ``work`` for every pair of neighbouring bounds: the first in this thread, others beside it."""
    first, *others = pairwise(bounds)
    if not others:
        work(*first)
        return
    started = [_pool(os.getpid()).submit(work, *part) for part in others]
    work(*first)
    for part in started:
        part.result()


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Threads of this process: a fork has none of those of its parent."""
    return ThreadPoolExecutor(thread_name_prefix="kernels")
