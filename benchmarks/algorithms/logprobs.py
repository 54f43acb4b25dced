"""Compare logprob with entropy at T = 4,096, V = 32,000 with ``log_softmax`` and ``gather``: time and peak memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.algorithms.measure import Row, best_times, peak_bytes, time_rows
from slime_like.algorithms import fused_logprobs, logprobs_and_entropy, selective_log_softmax

TOKENS, VOCABULARY, HIDDEN = 4096, 32000, 256
PLAIN, OURS = "log_softmax, gather", "logprobs_and_entropy"
Score = Callable[[Tensor, Tensor], Tensor]


def rows() -> list[Row]:
    """Measure forward, and forward with backward; extra memory beyond the logits and their gradient."""
    forms: dict[str, Score] = {
        PLAIN: _plain,
        "the same with entropy": _plain_with_entropy,
        "selective_log_softmax": selective_log_softmax,
        OURS: lambda logits, targets: torch.stack(logprobs_and_entropy(logits, targets)),
    }
    targets = _targets()
    logits = torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(0)).requires_grad_()
    forward = best_times({name: _forward(score, logits, targets) for name, score in forms.items()}, repeats=3)
    both = best_times({name: _both(score, logits, targets) for name, score in forms.items()}, repeats=3)
    goals = {OURS: 1 / 1.2}  # though it has entropies, too
    found = time_rows("logprobs, forward", forward, PLAIN, goals)
    found += time_rows("logprobs, forward and backward", both, PLAIN, goals)
    del logits
    for name, score in forms.items():
        found.append(_memory_row(name, score))
    return [*found, _fused_row()]


def _plain(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def _plain_with_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    log_softmax = logits.log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return torch.stack([log_softmax.gather(1, targets[:, None])[:, 0], entropy])


def _targets() -> Tensor:
    return torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))


def _forward(score: Score, logits: Tensor, targets: Tensor) -> Callable[[], object]:
    return lambda: score(logits, targets)


def _both(score: Score, logits: Tensor, targets: Tensor) -> Callable[[], object]:
    def run() -> None:
        logits.grad = None
        score(logits, targets).sum().backward()

    return run


def _memory_row(name: str, score: Score) -> Row:
    """Measure memory without the gradient, which every form allocates."""
    targets, nbytes = _targets(), TOKENS * VOCABULARY * 4
    peak = peak_bytes(
        lambda: torch.randn(TOKENS, VOCABULARY).requires_grad_(),
        lambda logits: score(logits, targets).sum().backward(),  # type: ignore[arg-type]
    )
    extra = max(0, peak - nbytes)
    goal = ("at most 1/8 of the logits", extra / nbytes <= 0.125) if name == OURS else ()
    return Row("logprobs, extra peak memory", name, extra / 2**20, "MiB", f"{extra / nbytes:.3f} of the logits", *goal)


def _fused_row() -> Row:
    """Measure the head on hidden states, which never allocates whole logits or their gradient."""
    targets, temperatures = _targets(), torch.ones(TOKENS)
    nbytes = TOKENS * VOCABULARY * 4

    def run(inputs: Any) -> None:
        hidden, weight = inputs
        logprobs, entropy = fused_logprobs(
            hidden, weight, targets, temperatures, vocab_size=VOCABULARY, chunk_tokens=128
        )
        (logprobs.sum() + entropy.sum()).backward()

    def prepare() -> tuple[Tensor, Tensor]:
        return torch.randn(TOKENS, HIDDEN).requires_grad_(), torch.randn(VOCABULARY, HIDDEN).requires_grad_()

    extra = peak_bytes(prepare, run)
    note = f"{extra / nbytes:.3f} of the logits, gradients of hidden and weight included"
    return Row("logprobs, extra peak memory", "fused_logprobs (chunks of 128)", extra / 2**20, "MiB", note)
