"""No packing, padding, micro-batch split, rank count, context layout or vocabulary chunk shows in loss or gradient.

The reference computes one sequence at a time, unpacked, in float64, with every logit kept, and takes its mean last.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_like.algorithms import (
    LossInputs,
    LossSums,
    build_loss,
    fused_logprobs,
    merge_from_context_parallel,
    pack_sequences,
    padded_length,
    partition_by_tokens,
    response_tokens,
    split_for_context_parallel,
    step_denominator,
    token_weights,
    zero_weight_pack,
)
from slime_like.config.algorithm import AlgorithmConfig
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory
from tests.unit.algorithms.cases import VOCABULARY, batch, shapes

HIDDEN = 6
CONFIG = AlgorithmConfig(clip_low=0.1, clip_high=0.3, kl_coef=0.2, kl_estimator="k3", entropy_coef=0.05)


class TinyModel:
    """Hidden state of a token from its id and its position: enough to show a wrong shift or position."""

    def __init__(self, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(0)
        self.tokens, self.positions, self.head = (
            torch.randn(rows, HIDDEN, generator=g, dtype=torch.float64).mul(0.5).to(dtype).requires_grad_()
            for rows in (VOCABULARY, 512, VOCABULARY)
        )
        self.parameters = [self.tokens, self.positions, self.head]

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return torch.tanh(self.tokens[tokens] + self.positions[positions])


def reference(sequences: list[ScoredTrajectory], reduction: str) -> tuple[float, list[Tensor]]:
    model = TinyModel(torch.float64)
    per_sample: list[Tensor] = []
    for s in sequences:
        ids = torch.cat([s.prompt_tokens, s.response_tokens])
        logits = model.hidden(ids, torch.arange(s.total_len)) @ model.head.T / s.temperature
        log_softmax = logits.log_softmax(-1)[s.prompt_len - 1 : -1]
        logprobs = log_softmax.gather(1, s.response_tokens[:, None])[:, 0]
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        ratio = (logprobs - s.old_logprobs.double()).exp()
        a = s.advantages.double()
        policy = -torch.minimum(ratio * a, ratio.clamp(0.9, 1.3) * a)
        d = s.ref_logprobs.double() - logprobs
        per_sample.append((policy + 0.2 * (d.exp() - d - 1) - 0.05 * entropy)[s.loss_mask])
    if reduction == "tokens":
        loss = torch.cat(per_sample).mean()
    elif reduction == "samples":
        loss = torch.stack([x.mean() for x in per_sample if x.numel()]).mean()
    else:
        ids = [s.group_id for s in sequences]
        pooled = [torch.cat([x for x, i in zip(per_sample, ids, strict=True) if i == g]) for g in dict.fromkeys(ids)]
        loss = torch.stack([x.mean() for x in pooled if x.numel()]).mean()
    return loss.item(), list(torch.autograd.grad(loss, model.parameters, allow_unused=True))


def micro_batch_loss(
    model: TinyModel, packed: PackedTrajectory, cp: int, layout: str, chunk: int
) -> tuple[Tensor, LossSums]:
    """What the ranks of one context-parallel group compute together."""
    temperatures = packed.temperatures.repeat_interleave(packed.response_lens)
    shards = [split_for_context_parallel(packed, cp, rank, layout) for rank in range(cp)]  # type: ignore[arg-type]
    local = []
    for shard in shards:
        hidden = model.hidden(shard.tokens, shard.position_ids)[shard.response_index]
        local.append(
            fused_logprobs(
                hidden,
                model.head,
                response_tokens(packed)[shard.response_slot],
                temperatures[shard.response_slot].double(),
                vocab_size=VOCABULARY,
                chunk_tokens=chunk,
            )
        )
    logprobs, entropy = (merge_from_context_parallel(shards, [pair[i] for pair in local]) for i in range(2))
    output = build_loss(CONFIG)(
        LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            old_logprobs=packed.old_logprobs,
            behaviour_logprobs=packed.logprobs,
            ref_logprobs=packed.ref_logprobs,
            advantages=packed.advantages,
            loss_mask=packed.loss_mask,
            token_weights=packed.token_weights.double(),
            response_lens=packed.response_lens,
        )
    )
    return output.loss, output.sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    shapes=shapes(12, 60),
    padding=st.integers(0, 50),
    ranks=st.integers(1, 3),
    cp=st.sampled_from([1, 2, 3, 8]),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    chunk=st.integers(1, 64),
    reduction=st.sampled_from(["tokens", "samples", "groups"]),
    seed=st.integers(0, 9),
)
@settings(max_examples=25, deadline=None)
def test_loss_and_gradient(dtype, shapes, padding, ranks, cp, layout, chunk, reduction, seed) -> None:  # type: ignore[no-untyped-def]
    sequences = batch(shapes, seed)
    for index, s in enumerate(sequences):
        s.temperature = 0.5 + 0.25 * (index % 3)  # exact in float32, so that both sides divide by the same number
    counts = [int(s.loss_mask.sum()) for s in sequences]
    if not any(counts):
        return
    groups = [s.group_id for s in sequences]
    for s, weight in zip(sequences, token_weights(reduction, counts, groups), strict=True):
        s.token_weight = weight
    expected_loss, expected_gradients = reference(sequences, reduction)
    model = TinyModel(dtype)
    budget = max(padded_length(s.total_len, cp) for s in sequences) + padding
    lengths = [padded_length(s.total_len, cp) for s in sequences]
    partition = partition_by_tokens(lengths, budget, min(ranks, len(sequences)))
    total, sums = torch.zeros((), dtype=torch.float64), LossSums.zeros()
    for own in partition:
        packs = [pack_sequences([sequences[i] for i in members], target_tokens_per_batch=budget) for members in own]
        for packed in [*packs, zero_weight_pack(packs[0])]:
            loss, figures = micro_batch_loss(model, packed, cp, layout, chunk)
            loss.backward()
            total, sums = total + loss.detach().double(), sums.add(figures)
    denominator = step_denominator(reduction, counts, groups)
    # Weights reach the pack as float32: 1/3 alone costs 1e-8, which is why "tokens" alone is compared to 1e-12.
    tolerance = 1e-12 if dtype == torch.float64 and reduction == "tokens" else 1e-6 if dtype == torch.float32 else 1e-7
    assert total.item() / denominator == pytest.approx(expected_loss, rel=tolerance, abs=tolerance)
    assert sums.to_stats(denominator, 0.0, 0.0).loss.item() == pytest.approx(
        expected_loss, rel=tolerance, abs=tolerance
    )
    assert sums.num_tokens.item() == sum(counts)
    for parameter, expected in zip(model.parameters, expected_gradients, strict=True):
        assert parameter.grad is not None
        error = (parameter.grad.double() / denominator - expected).abs().max()
        assert error <= tolerance * (expected.abs().max() + (0 if dtype == torch.float64 else 1))
