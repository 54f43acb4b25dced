"""pass@k: the chance that at least one of k samples succeeds."""

from collections.abc import Sequence
from math import comb


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate for one prompt, ``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    Args:
        num_samples: n, samples drawn.
        num_correct: c, how many of them succeeded.
        k: at most n.

    Returns:
        0 to 1.

    Raises:
        ValueError: k or c outside 1 to n or 0 to n.

    Example:
        >>> pass_at_k(num_samples=4, num_correct=1, k=2)
        0.5
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} successes in {num_samples} samples; k is 1 to {num_samples}")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def mean_pass_at_k(successes: Sequence[Sequence[bool]], k: int) -> float:
    """Mean of ``pass_at_k`` over prompts.

    Args:
        successes: one row per prompt, one entry per sample; rows may differ in length.
        k: at most the samples of every row.

    Returns:
        0 to 1.

    Raises:
        ValueError: no prompt at all, or as in ``pass_at_k``.
    """
    if not successes:
        raise ValueError("no prompt has samples, so that there is no mean; give at least one row")
    return sum(pass_at_k(len(row), sum(row), k) for row in successes) / len(successes)


def powers_up_to(num_samples: int) -> list[int]:
    """The k that are reported: powers of two above 1 and below n, and n itself; none for n = 1."""
    powers = [2**i for i in range(1, num_samples.bit_length()) if 2**i < num_samples]
    return [*powers, num_samples] if num_samples > 1 else []
