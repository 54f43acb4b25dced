"""Conversion of requests to vLLM's parameters, and of its outputs to generations. Importing this imports vLLM."""

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import logprobs as of_engine
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from rollout.requests import finish_reason, sample_seed, stop_ids, supports_of, weight_versions
from rollout.vllm.arguments import MOST_TIES
from slime_like.errors import EngineError
from slime_like.interfaces import Generation, GenerationRequest, Supports
from slime_like.models.dimensions import ModelDimensions

_MADE_BY = "create_sample_logprobs"


def sampling_params(request: GenerationRequest, dimensions: ModelDimensions, masks: bool = False) -> SamplingParams:
    """Return vLLM's parameters, for one final output per request. Stop ids are explicit.

    Args:
        masks: vLLM returns each token's support (``return_sampling_mask``). It then rejects greedy requests and
            requests without ``top_k``, which become ``top_k`` 1 and the whole vocabulary.
    """
    sampling = request.sampling
    greedy = sampling.temperature == 0
    temperature, top_k = sampling.temperature, sampling.top_k
    if masks:
        temperature, top_k = (1.0, 1) if greedy else (temperature, top_k if top_k > 0 else dimensions.vocab_size)
    return SamplingParams(
        # vLLM samples greedily once; `generations` repeats the result.
        n=1 if greedy else request.num_samples,
        temperature=temperature,
        top_p=sampling.top_p,
        top_k=top_k,
        min_p=sampling.min_p,
        # vLLM adds the sample's index itself.
        seed=None if request.seed is None else sample_seed(request.seed, 0),
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(stop_ids(sampling, dimensions)),
        ignore_eos=True,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        # Without masks, the support consists of the truncated distribution's likeliest tokens.
        logprobs=min(top_k + MOST_TIES, dimensions.vocab_size) if sampling.wants_supports and not masks else 0,
        prompt_logprobs=0 if request.prompt_logprobs else None,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),  # only to look for stop strings
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def generations(
    request: GenerationRequest, output: RequestOutput, version: int, dimensions: ModelDimensions, masks: bool = False
) -> list[Generation]:
    """Return one generation per sample, in order.

    Args:
        version: the served version, for responses that ended before their first token.
        masks: as for ``sampling_params``.
    """
    prompt_logprobs = _prompt_logprobs(output) if request.prompt_logprobs else None
    samples = output.outputs if request.sampling.temperature > 0 else output.outputs * request.num_samples
    found = [_generation(request, sample, prompt_logprobs, version, masks) for sample in samples]
    for generation, sample in zip(found, samples, strict=True):
        if sample.routed_experts is not None and request.sampling.training:
            generation.fields = {"routes": sample.routed_experts[:, dimensions.expert_layers.start :].astype(np.int16)}
    return found


def _generation(
    request: GenerationRequest, sample: CompletionOutput, prompt_logprobs: np.ndarray | None, version: int, masks: bool
) -> Generation:
    token_ids = np.asarray(sample.token_ids, dtype=np.int64)
    ids, logprobs = _logprobs(sample.logprobs, len(token_ids))
    supports = None
    if request.sampling.wants_supports:
        supports = _masked(sample, token_ids) if masks else supports_of(ids[:, 1:], logprobs[:, 1:], "vLLM")
    elif request.sampling.truncates or (masks and request.sampling.temperature == 0):
        # vLLM has only logprobs over the truncated distribution, not over the whole vocabulary.
        logprobs.fill(np.nan)
    spans = ((span.start, span.end, span.version) for span in sample.weight_versions or ())
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs[:, 0],
        weight_versions=weight_versions(len(token_ids), version, spans),
        finish_reason=finish_reason(request, "vLLM", sample.finish_reason, repr(sample.finish_reason)),
        prompt_logprobs=prompt_logprobs,
        supports=supports,
        drafts=_drafts(sample.spec_decode_metrics),
    )


def _drafts(metrics: RequestSpecDecodeMetrics | None) -> tuple[int, int]:
    """Return the passes that checked drafted tokens, and the accepted ones, from a histogram over passes."""
    passes = [] if metrics is None else metrics.histogram
    return sum(passes), sum(accepted * count for accepted, count in enumerate(passes))


def _masked(sample: CompletionOutput, token_ids: np.ndarray) -> Supports:
    """Return vLLM's own supports: for each token, the ids left by top-k, top-p and min-p."""
    masks = [] if sample.sampling_mask is None else sample.sampling_mask.token_ids
    supports = Supports.of([np.asarray(mask, np.int32) for mask in masks])
    if len(masks) != len(token_ids) or not all(masks) or not supports.hold(token_ids).all():
        problem = (
            f"vLLM returned supports of {len(masks)} tokens for {len(token_ids)}, or supports without the sampled token"
        )
        raise EngineError(problem, code="engine-version", remedy="set rollout.engine_args.return_sampling_mask: false")
    return supports


def _logprobs(flat: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and logprobs (n, w): at each position, vLLM lists the sampled token, then the likeliest ones."""
    if not count:
        return np.empty((0, 1), np.int64), np.empty((0, 1), np.float32)
    ids, logprobs = np.array(flat.token_ids, np.int64), np.array(flat.logprobs, np.float32)
    if len(flat.start_indices) != count or len(logprobs) % count:
        problem = f"vLLM returned {len(logprobs)} logprobs for {count} tokens"
        raise EngineError(problem, code="engine-version", remedy="install a supported version")
    return ids.reshape(count, -1), logprobs.reshape(count, -1)


def _prompt_logprobs(output: RequestOutput) -> np.ndarray | None:
    """Return logprobs from position 1 on (position 0 has an empty range); ``None`` if the prompt never ran."""
    flat: Any = output.prompt_logprobs
    if not flat:
        return None
    starts = flat.start_indices[1:]
    return np.asarray([flat.logprobs[start] for start in starts], dtype=np.float32)


class CompactLogprobs(FlatLogprobs):
    """Container with a tenth of the memory: the supports of ``top_k`` 512 would take about 50 KB per token.

    Leaves out ranks and texts, which are not used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.token_ids = array("i")
        self.logprobs = array("f")

    def append_fast(
        self, token_ids: list[int], logprobs: list[float], ranks: Iterator[int], decoded_tokens: Iterable[str | None]
    ) -> None:
        """Append one position. ``ranks`` has as many entries as this request asked for; the batch may have more."""
        count = sum(1 for _ in ranks)
        self.start_indices.append(len(self.logprobs))
        self.token_ids.extend(token_ids[:count])
        self.logprobs.extend(logprobs[:count])
        self.end_indices.append(len(self.logprobs))


def use_compact_logprobs() -> None:
    """Use this container for all flat logprobs in this process. Raises ``EngineError`` if vLLM has changed."""
    if not hasattr(of_engine, _MADE_BY):
        problem = f"vllm.v1.engine.logprobs has no {_MADE_BY}"
        raise EngineError(problem, code="engine-version", remedy="its version is not supported")
    setattr(of_engine, _MADE_BY, lambda is_flat: CompactLogprobs() if is_flat else [])
