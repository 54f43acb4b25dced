"""Sampling in SGLang's scheduler, with one code path for every request.

SGLang's own sampler reads seeds only with ``--enable-deterministic-inference``, which excludes CPUs. It also draws
differently if the batch has a greedy or truncated request, so the same seed would give other ids in other batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.sampler import Sampler
from torch import Tensor

from rollout.drawing import Limits, draw, uniforms

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class SeededSampler(Sampler):
    """Sampler that inverts the cumulative distribution at a number determined by seed and position only.

    Logprobs are of the temperature-scaled logits over the whole vocabulary. For requests that ask for the likeliest
    tokens, they are over the truncated distribution. SGLang marks greedy requests with ``top_k == 1``.
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
        """Return ids (B,) int32 for logits (B, V)."""
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info).float()
        logprobs = (logits / sampling_info.temperatures).log_softmax(dim=-1)
        tokens = logits.argmax(dim=-1)
        if not sampling_info.is_all_greedy:
            numbers = uniforms(sampling_info.sampling_seed, positions)
            drawn = draw(logprobs, numbers, _limits(sampling_info), _wanted(top_logprobs_nums, logits.device))
            tokens = torch.where(sampling_info.top_ks == 1, tokens, drawn)
        if return_logprob:
            result = self.output_logprob_processor.compute_logprobs(
                logprobs, top_logprobs_nums, token_ids_logprobs, tokens
            )
            result.write_output_to(logits_output)
        return tokens.to(torch.int32)


def _wanted(top_logprobs_nums: list[int], device: torch.device) -> Tensor | None:
    """Return which requests ask for the likeliest tokens, (B,) bool; ``None`` if none does. Never waits for a GPU."""
    if not any(top_logprobs_nums):
        return None
    flags = torch.tensor([number > 0 for number in top_logprobs_nums], pin_memory=device.type == "cuda")
    return flags.to(device, non_blocking=True)


def _limits(info: SamplingBatchInfo) -> Limits | None:
    """Return the truncation limits, or ``None`` if no request truncates, which SGLang records on the host."""
    if not (info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling):
        return None
    return Limits(info.top_ks, info.top_ps, info.min_ps if info.need_min_p_sampling else None)
