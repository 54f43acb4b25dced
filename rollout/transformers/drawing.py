"""Draws on a CPU: ``draw_tokens`` in one pass over the logits wherever nothing is truncated."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rollout.transformers.samples import Sample, draw_tokens
from slime_like.cpu.kernels import draw


def draw_tokens_fused(logits: Tensor, samples: Sequence[Sample]) -> tuple[list[int], list[float]]:
    """The same as ``draw_tokens``, up to rounding. Which of both draws a row depends on that row alone."""
    cut = [row for row, sample in enumerate(samples) if sample.sampling.truncates]
    if not cut:
        return _draw(logits, samples)
    if len(cut) == len(samples):
        return draw_tokens(logits, samples)
    whole = sorted(set(range(len(samples))) - set(cut))
    tokens, logprobs = [0] * len(samples), [0.0] * len(samples)
    for rows, drawing in ((whole, _draw), (cut, draw_tokens)):
        for row, token, logprob in zip(rows, *drawing(logits[rows], [samples[row] for row in rows]), strict=True):
            tokens[row], logprobs[row] = token, logprob
    return tokens, logprobs


def _draw(logits: Tensor, samples: Sequence[Sample]) -> tuple[list[int], list[float]]:
    count = len(samples)
    tokens, logprobs = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.float32)
    temperatures = np.array([sample.sampling.temperature for sample in samples], dtype=np.float32)
    uniform = np.array([sample.stream.random() for sample in samples])
    draw.forward(logits.to(torch.float32).contiguous().numpy(), temperatures, uniform, tokens, logprobs)
    return tokens.tolist(), logprobs.tolist()
