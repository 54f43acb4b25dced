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

from rollout.drawing import Limits, draw, uniforms

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class SeededSampler(Sampler):
    """Draws by inverting the cumulative distribution at a number that depends on seed and position alone.

    Logprobs are those of the temperature-scaled logits over the whole vocabulary, also where the distribution that is
    sampled from is cut; of requests that ask for the likeliest tokens they are over what these were drawn from. SGLang
    says "greedy" by ``top_k == 1`` at temperature 1.
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
    """Return which requests ask for likeliest tokens, (B,) bool, or ``None`` if none does; never waits for a GPU."""
    if not any(top_logprobs_nums):
        return None
    flags = torch.tensor([number > 0 for number in top_logprobs_nums], pin_memory=device.type == "cuda")
    return flags.to(device, non_blocking=True)


def _limits(info: SamplingBatchInfo) -> Limits | None:
    """Return ``None`` if no request cuts anything, which SGLang notes on the host."""
    if not (info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling):
        return None
    return Limits(info.top_ks, info.top_ps, info.min_ps if info.need_min_p_sampling else None)
