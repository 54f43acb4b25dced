"""Sampling in SGLang's scheduler: one path for every request of a batch.

SGLang's own sampler reads a request's seed only under ``--enable-deterministic-inference``, which excludes CPUs, and
draws a batch that holds one greedy or truncated request in another way than one that holds none: the same seed would
give other ids depending on who else runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.sampler import Sampler
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class SeededSampler(Sampler):
    """Draws by inverting the cumulative distribution at a number that depends on seed and position alone.

    Logprobs are those of the temperature-scaled logits over the whole vocabulary, also where top-k and top-p cut the
    distribution that is sampled from. SGLang says "greedy" by ``top_k == 1`` at temperature 1.
    """

    def forward(
        self,
        logits_output: LogitsProcessorOutput,
        sampling_info: SamplingBatchInfo,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: Tensor,
        **_: Any,
    ) -> Tensor:
        """(B,) int32 ids for logits (B, V)."""
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info).float()
        logprobs = (logits / sampling_info.temperatures).log_softmax(dim=-1)
        tokens = logits.argmax(dim=-1)
        if not sampling_info.is_all_greedy:
            drawn = draw(logprobs, uniforms(sampling_info.sampling_seed, positions), sampling_info)
            tokens = torch.where(sampling_info.top_ks == 1, tokens, drawn)
        if return_logprob:
            result = self.output_logprob_processor.compute_logprobs(
                logprobs, top_logprobs_nums, token_ids_logprobs, tokens
            )
            result.write_output_to(logits_output)
        return tokens.to(torch.int32)


def draw(logprobs: Tensor, uniform: Tensor, sampling_info: SamplingBatchInfo) -> Tensor:
    """(B,) int64 ids from ``logprobs`` (B, V) cut by each row's top-k, then top-p, at ``uniform`` (B,) in [0, 1)."""
    probabilities = logprobs.double().exp()
    if sampling_info.need_top_k_sampling or sampling_info.need_top_p_sampling:
        _truncate(probabilities, sampling_info.top_ks, sampling_info.top_ps)
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))  # the product may be rounded up to the total
    return torch.searchsorted(cumulative, torch.minimum(uniform[:, None] * total, below_total), right=True)[:, 0]


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """(B,) float64 in [0, 1), a function of (B,) int64 seeds and positions, with 53 random bits."""
    bits = mix(mix(seeds) + positions)
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def mix(value: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64 tensors, elementwise; the sign bit is an ordinary bit, the result has 64.

    Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    value = value + _signed(0x9E3779B97F4A7C15)
    value = (value ^ _shift_right(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift_right(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's copies the sign bit."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _truncate(probabilities: Tensor, top_ks: Tensor, top_ps: Tensor) -> None:
    """Zero, in place, what top-k and then top-p leave out."""
    ordered = probabilities.sort(dim=-1, descending=True)
    ranks = torch.arange(probabilities.shape[-1], device=probabilities.device)
    kept = ordered.values.masked_fill(ranks >= top_ks[:, None], 0.0)
    before, limit = kept.cumsum(dim=-1) - kept, top_ps[:, None]
    # Where top_p is 1, rounding must not cut the tail.
    kept.masked_fill_((limit < 1.0) & (before >= limit * kept.sum(dim=-1, keepdim=True)), 0.0)
    probabilities.scatter_(1, ordered.indices, kept)
