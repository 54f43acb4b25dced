"""Packing, padding, micro-batch splits, context layouts and vocabulary chunks don't change loss or gradient.

The reference computes one unpacked sequence at a time in float64, with all logits, and takes the mean at the end.
Process groups aren't covered: the ranks of a context-parallel group are computed one after the other.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import Phase, given
from hypothesis import strategies as st
from torch import Tensor

from slime_like.algorithms import (
    LossInputs,
    LossSums,
    build_loss,
    fused_logprobs,
    pack_sequences,
    response_tokens,
    split_for_context_parallel,
    step_denominator,
    token_weights,
    zero_weight_pack,
)
from slime_like.config.algorithm import AlgorithmConfig
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory
from tests.support.properties import examples
from tests.unit.algorithms.cases import (
    CP_SIZES,
    LAYOUTS,
    PADDINGS,
    REDUCTIONS,
    SEEDS,
    VOCABULARY,
    batch,
    dense_scores,
    mean_by_definition,
    options_of,
    shapes,
)

HIDDEN = 6

# Distances between current, old and engine policy, in nats. None is near a clip's bound, where the last bit of a
# float32 would decide whether a token has a gradient.
OFFSETS = (-0.4, -0.15, -0.05, 0.0, 0.05, 0.15, 0.4)

# Large enough that neither KL nor entropy cancels the policy term: the small difference of two floats is rounding.
ADVANTAGES = (-2.0, -1.1, -0.7, 0.7, 1.1, 2.0)


class TinyModel:
    """Model whose hidden states depend on a token's id and position, which shows a wrong shift or position."""

    def __init__(self, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(0)
        self.tokens, self.positions, self.head = (
            torch.randn(rows, HIDDEN, generator=g, dtype=torch.float64).mul(0.5).to(dtype).requires_grad_()
            for rows in (VOCABULARY, 512, VOCABULARY)
        )
        self.parameters = [self.tokens, self.positions, self.head]

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return torch.tanh(self.tokens[tokens] + self.positions[positions])


# ----------------------------------------------------------------------------------------------------- the formulas
def clipped(ratio: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * a, ratio.clamp(low, high) * a)


def ppo(lp: Tensor, old: Tensor, engine: Tensor, ref: Tensor, a: Tensor, mask: Tensor) -> Tensor:
    loss = clipped((lp - old).exp(), a, 0.9, 1.3)
    loss = torch.minimum(loss, -1.2 * a) if a < 0 else loss
    return loss + 0.2 * ((ref - lp).exp() - (ref - lp) - 1)


def gspo(lp: Tensor, old: Tensor, engine: Tensor, ref: Tensor, a: Tensor, mask: Tensor) -> Tensor:
    """Compute GSPO with k2 and sequence-level masked importance sampling."""
    ratio = (lp - old)[mask].mean().exp()
    rho = (old - engine)[mask].sum().exp()
    weight = rho if 0.5 <= rho <= 2.0 else 0.0
    return clipped(ratio, a, 0.9, 1.1).expand_as(lp) * weight + 0.1 * (lp - ref).square() / 2


def cispo(lp: Tensor, old: Tensor, engine: Tensor, ref: Tensor, a: Tensor, mask: Tensor) -> Tensor:
    """Compute CISPO with token-level truncated importance sampling and ratio-weighted k1."""
    ratio = (lp - old).exp()
    weight = (old - engine).exp().clamp_max(1.1)
    return -ratio.detach().clamp(0.8, 1.3) * a * lp * weight + 0.1 * ratio * (lp - ref)


def policy_gradient(lp: Tensor, old: Tensor, engine: Tensor, ref: Tensor, a: Tensor, mask: Tensor) -> Tensor:
    """Compute it with the geometric mask, and without sequences of negative advantage over 0.12 nats off-policy."""
    rho = (old - engine)[mask].mean().exp()
    weight = rho if 0.8 <= rho <= 1.3 else 0.0
    dropped = a < 0 and (engine - lp.detach())[mask].mean() > 0.12
    return -a * lp * (0.0 if dropped else weight)


def sft(lp: Tensor, old: Tensor, engine: Tensor, ref: Tensor, a: Tensor, mask: Tensor) -> Tensor:
    return -lp


Formula = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
CASES: dict[str, tuple[Formula, dict[str, Any]]] = {
    "ppo_clip": (
        ppo,
        {
            "loss": {"name": "ppo_clip", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.2},
            "kl": {"coef": 0.2, "estimator": "k3"},
        },
    ),
    "gspo": (
        gspo,
        {
            "loss": {"name": "gspo", "clip_low": 0.1, "clip_high": 0.1},
            "kl": {"coef": 0.1, "estimator": "k2"},
            "importance": {"correction": "mask", "level": "sequence", "low": 0.5, "high": 2.0},
        },
    ),
    "cispo": (
        cispo,
        {
            "loss": {"name": "cispo", "clip_low": 0.2, "clip_high": 0.3},
            "kl": {"coef": 0.1, "estimator": "k1", "importance_weighted": True},
            "importance": {"correction": "truncate", "high": 1.1},
        },
    ),
    "policy_gradient": (
        policy_gradient,
        {
            "loss": "policy_gradient",
            "importance": {"correction": "mask", "level": "geometric", "low": 0.8, "high": 1.3},
            "off_policy_mask": 0.12,
        },
    ),
    "sft": (sft, {"loss": "sft"}),
}
ENTROPY_COEF = 0.05


# ---------------------------------------------------------------------------------------------------- the reference
def make_sequences(shapes: list[tuple[int, int]], seed: int) -> list[ScoredTrajectory]:
    """Make sequences with old, engine and reference logprobs at chosen distances from the policy's."""
    model, pick = TinyModel(torch.float64), random.Random(seed)
    sequences = batch(shapes, seed)
    for index, s in enumerate(sequences):
        s.temperature = 0.7 + 0.3 * (index % 3)
        alone = score_alone(model, s)[0].detach()
        old, engine = pick.choice(OFFSETS), pick.choice(OFFSETS)
        s.old_logprobs = (alone + old).float()
        s.logprobs = (alone + old + engine).float()
        s.advantages = torch.full((s.response_len,), pick.choice(ADVANTAGES))
        # Far enough away: the difference of two nearly equal float32 numbers has no precision of 1e-6.
        distance = 0.5 + torch.rand(alone.shape, generator=torch.Generator().manual_seed(seed))
        s.ref_logprobs = (alone - distance).float()
    return sequences


def score_alone(model: TinyModel, s: ScoredTrajectory) -> tuple[Tensor, Tensor]:
    """Return (response_len,) logprobs and entropies of one unpacked sequence, from all its logits."""
    ids = torch.cat([s.prompt_tokens, s.response_tokens])
    logits = model.hidden(ids, torch.arange(s.total_len)) @ model.head.T / s.temperature
    return dense_scores(logits[s.prompt_len - 1 : -1], s.response_tokens)


def reference(sequences: list[ScoredTrajectory], name: str, reduction: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the loss, the mean size of its terms (which may cancel), and gradients."""
    model, losses = TinyModel(torch.float64), []
    for s in sequences:
        logprobs, entropy = score_alone(model, s)
        others = [x.double() for x in (s.old_logprobs, s.logprobs, s.ref_logprobs, s.advantages[0])]  # type: ignore[union-attr]
        per_token = CASES[name][0](logprobs, *others, s.loss_mask) if s.loss_mask.any() else logprobs
        losses.append((per_token - ENTROPY_COEF * entropy)[s.loss_mask])
    groups = [s.group_id for s in sequences]
    loss = mean_by_definition(losses, groups, reduction)
    size = mean_by_definition([x.detach().abs() for x in losses], groups, reduction)
    return loss.detach(), size, list(torch.autograd.grad(loss, model.parameters))


# --------------------------------------------------------------------------------------------------------- the system
def micro_batch_loss(
    model: TinyModel, packed: PackedTrajectory, config: AlgorithmConfig, cp: int, layout: str, chunk: int
) -> tuple[Tensor, LossSums]:
    """Compute the loss and the metrics of the ranks of one context-parallel group together."""
    temperatures = packed.temperatures.repeat_interleave(packed.response_lens)
    shards = [split_for_context_parallel(packed, cp, rank, layout) for rank in range(cp)]  # type: ignore[arg-type]
    local = []
    for shard in shards:
        hidden = model.hidden(shard.tokens, shard.position_ids)[shard.response_index]
        scored = (hidden, model.head, *(x[shard.response_slot] for x in (response_tokens(packed), temperatures)))
        local.append(fused_logprobs(*scored, vocab_size=VOCABULARY, chunk_tokens=chunk))
    merged = [[s.scatter(pair[i]) for s, pair in zip(shards, local, strict=True)] for i in range(2)]
    logprobs, entropy = (torch.stack(parts).sum(0) for parts in merged)
    recorded = packed.old_logprobs, packed.logprobs, packed.ref_logprobs, packed.advantages, packed.response_lens
    output = build_loss(config)(LossInputs(logprobs, packed.loss_mask, packed.token_weights, entropy, *recorded))
    return output.loss, output.sums


def random_split(sequences: list[ScoredTrajectory], seed: int) -> list[list[ScoredTrajectory]]:
    """Shuffle sequences and cut them into any micro-batches."""
    pick = random.Random(seed)
    shuffled = pick.sample(sequences, len(sequences))
    cuts = sorted(pick.sample(range(1, len(shuffled)), pick.randint(0, min(6, len(shuffled) - 1))))
    return [shuffled[a:b] for a, b in zip([0, *cuts], [*cuts, len(shuffled)], strict=True)]


def weigh(rows: Sequence[ScoredTrajectory], reduction: str) -> float | None:
    """Set every row's weight; return the step's denominator, or ``None`` if no token carries loss."""
    counts, groups = [int(row.loss_mask.sum()) for row in rows], [row.group_id for row in rows]
    if not any(counts):
        return None
    rollouts, options = [row.rollout_id for row in rows], options_of(reduction)
    for row, weight in zip(rows, token_weights(reduction, counts, groups, rollouts, **options), strict=True):
        row.token_weight = weight
    return step_denominator(reduction, counts, groups, rollouts, **options)


# Shrinking a failing example would take minutes.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def assert_equal_in_norm(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Compare up to the rounding of ``dtype``, and exactly if zero is expected."""
    assert (actual.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", CASES)
@given(
    reduction=st.sampled_from(REDUCTIONS),
    shapes=shapes(40, 300),
    padding=PADDINGS,
    cp=CP_SIZES,
    layout=LAYOUTS,
    chunk=st.integers(8, 512),
    seed=SEEDS,
)
@examples(6, phases=PHASES)
def test_loss_and_gradient(name, dtype, reduction, shapes, padding, cp, layout, chunk, seed) -> None:  # type: ignore[no-untyped-def]
    sequences = make_sequences(shapes, seed)
    if not (denominator := weigh(sequences, reduction)):
        return
    expected, size, expected_gradients = reference(sequences, name, reduction)
    chosen = {"name": reduction, **options_of(reduction)}
    config = AlgorithmConfig(reduction=chosen, entropy_coef=ENTROPY_COEF, **CASES[name][1])
    model, total, sums = TinyModel(dtype), torch.zeros((), dtype=torch.float64), LossSums.zeros()
    for members in random_split(sequences, seed):
        budget = sum(s.total_len for s in members) + padding
        packed = pack_sequences(members, target_tokens_per_batch=budget)
        for pack in [packed, zero_weight_pack(packed)]:
            loss, figures = micro_batch_loss(model, pack, config, cp, layout, chunk)
            loss.backward()
            total, sums = total + loss.detach().double(), sums.add(figures)
    assert abs(total / denominator - expected) <= TOLERANCE[dtype] * size
    assert abs(sums.to_stats(denominator, 0.0, 0.0).loss - expected) <= TOLERANCE[dtype] * size
    assert sums.num_tokens.item() == sum(int(s.loss_mask.sum()) for s in sequences)
    for parameter, gradient in zip(model.parameters, expected_gradients, strict=True):
        assert parameter.grad is not None
        assert_equal_in_norm(parameter.grad / denominator, gradient, dtype)
