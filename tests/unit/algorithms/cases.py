"""Random trajectories and written-out definitions for the algorithm tests, independent of the tested code."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from slime_like.interfaces import Conversation
from slime_like.trajectory import ScoredTrajectory, UnscoredTrajectory

VOCABULARY = 29
CONSTANT_LENGTH = 70
REDUCTIONS = ("tokens", "samples", "groups", "constant")


def options_of(reduction: str) -> dict[str, float]:
    return {"length": CONSTANT_LENGTH} if reduction == "constant" else {}


def scored(
    index: int = 0, prompt_len: int = 3, response_len: int = 4, seed: int = 0, group_size: int = 2
) -> ScoredTrajectory:
    """Make a sequence with every field set, different from all other sequences."""
    generator = torch.Generator().manual_seed(1000 * seed + index)

    def logprobs() -> Tensor:
        return -3 * torch.rand(response_len, generator=generator)

    return ScoredTrajectory(
        prompt_tokens=torch.randint(0, VOCABULARY, (prompt_len,), generator=generator),
        response_tokens=torch.randint(0, VOCABULARY, (response_len,), generator=generator),
        prompt_len=prompt_len,
        response_len=response_len,
        logprobs=logprobs(),
        ref_logprobs=logprobs(),
        old_logprobs=logprobs(),
        rewards=torch.rand(2, generator=generator),
        successes=torch.randint(0, 2, (2,), generator=generator).float(),
        advantages=torch.randn((), generator=generator),
        answer=f"answer {index}",
        sequence_id=f"s{index}",
        rollout_id=f"r{index}",
        group_id=10**12 + index // group_size,
        reward_metadata={"func_names": ["a", "b"], "index": index},
        policy_version=index % 5,
        loss_mask=torch.rand(response_len, generator=generator) > 0.3,
        token_weight=1 / (3 + index),
        weight_versions=torch.randint(0, 9, (response_len,), generator=generator),
        temperature=0.7 + 0.1 * (index % 3),
        finish_reason=("stop", "length", "abort")[index % 3],
    )


def unscored(index: int = 0, prompt_len: int = 3, response_len: int = 4, seed: int = 0) -> UnscoredTrajectory:
    """Make the same sequence before scoring."""
    s = scored(index, prompt_len, response_len, seed)
    turns = Conversation(((0, response_len),), reward=index) if index % 2 else None
    shared = UnscoredTrajectory.__dataclass_fields__.keys() - {"conversation"}
    return UnscoredTrajectory(**{name: getattr(s, name) for name in shared}, conversation=turns)


def batch(shapes: list[tuple[int, int]], seed: int = 0) -> list[ScoredTrajectory]:
    """Make one scored sequence per (prompt_len, response_len)."""
    return [scored(i, p, r, seed) for i, (p, r) in enumerate(shapes)]


def dense_scores(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute logprobs of (...) ``targets`` and entropies by their definitions, from all (..., V) logits."""
    log_softmax = logits.log_softmax(-1)
    return log_softmax.gather(-1, targets[..., None])[..., 0], -(log_softmax.exp() * log_softmax).sum(-1)


def close(left: Tensor, right: Tensor, tolerance: float) -> bool:
    if right.numel() == 0:
        return left.shape == right.shape
    return bool((left.double() - right.double()).abs().max() <= tolerance * (1 + right.abs().max()))


def mean_by_definition(losses: list[Tensor], groups: list[int], reduction: str) -> Tensor:
    """Reduce losses, each of one sample's loss-carrying tokens. Empty samples and groups don't count."""
    if reduction == "tokens":
        return torch.cat(losses).mean()
    if reduction == "samples":
        return torch.stack([x.mean() for x in losses if x.numel()]).mean()
    if reduction == "constant":
        return torch.stack([x.sum() / CONSTANT_LENGTH for x in losses if x.numel()]).mean()
    pooled = [torch.cat([x for x, i in zip(losses, groups, strict=True) if i == g]) for g in dict.fromkeys(groups)]
    return torch.stack([x.mean() for x in pooled if x.numel()]).mean()


def gae_by_definition(rewards, values, mask, gamma, lam):  # type: ignore[no-untyped-def]
    """Compute A_t = sum over l of (gamma lam)^l delta_{t+l}, over kept tokens only."""
    kept = [i for i, m in enumerate(mask) if m]
    deltas = []
    for k, i in enumerate(kept):
        following = values[kept[k + 1]] if k + 1 < len(kept) else 0.0
        deltas.append((rewards if k + 1 == len(kept) else 0.0) + gamma * following - values[i])
    advantages = [0.0] * len(values)
    for k, i in enumerate(kept):
        advantages[i] = sum((gamma * lam) ** j * d for j, d in enumerate(deltas[k:]))
    return advantages


# ---------------------------------------------------------------------------------------------- hypothesis strategies
PADDINGS = st.integers(0, 50)
CP_SIZES = st.integers(1, 8)
LAYOUTS = st.sampled_from(["zigzag", "contiguous"])
SEEDS = st.integers(0, 10**6)

SHAPES = [(3, 4), (1, 1), (5, 2), (2, 7), (4, 1)]


def shapes(max_sequences: int = 40, max_len: int = 300) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Draw lists of (prompt_len, response_len): each at least 1, both together at most ``max_len`` tokens."""
    cut = st.integers(2, max_len).flatmap(lambda total: st.tuples(st.integers(1, total - 1), st.just(total)))
    return st.lists(cut.map(lambda pair: (pair[0], pair[1] - pair[0])), min_size=1, max_size=max_sequences)
