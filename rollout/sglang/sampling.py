"""Conversion of requests to SGLang's parameters, and of its outputs to generations."""

import base64
from typing import Any

import numpy as np

from rollout.requests import finish_reason, stop_ids, supports_of, weight_versions
from slime_like.errors import EngineError
from slime_like.interfaces import Generation, GenerationRequest, Supports
from slime_like.models.dimensions import ModelDimensions


def sampling_params(request: GenerationRequest, dimensions: ModelDimensions, seed: int) -> dict[str, Any]:
    """Return SGLang's parameters of one sample. ``ignore_eos`` stays off, because it would ignore every stop id.

    SGLang rejects stop strings without its own tokenizer, so only the scheduler gets them.
    """
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "min_p": sampling.min_p,
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(stop_ids(sampling, dimensions)),
        "custom_params": {"stop": list(sampling.stop)} if sampling.stop else None,
        "sampling_seed": seed,
    }


def generation(
    request: GenerationRequest, output: dict[str, Any], version: int, dimensions: ModelDimensions
) -> Generation:
    """Return one sample's result. Responses without a token get the served ``version``."""
    meta = output["meta_info"]
    token_ids = np.asarray(output["output_ids"], dtype=np.int64)
    spans = ((span["start"], span["end"], span["version"]) for span in meta.get("weight_versions") or ())
    return Generation(
        token_ids=token_ids,
        logprobs=_sampled_logprobs(meta, token_ids),
        weight_versions=weight_versions(len(token_ids), version, spans),
        finish_reason=finish_reason(request, "SGLang", meta["finish_reason"]["type"], meta["finish_reason"]),
        prompt_logprobs=_prompt_logprobs(meta) if request.prompt_logprobs else None,
        supports=_supports(meta, len(token_ids)) if request.sampling.wants_supports else None,
        fields=_routes(meta, dimensions) if meta.get("routed_experts") is not None else {},
    )


def nothing() -> Generation:
    """Return the result of a sample that was aborted before SGLang received it."""
    empty = np.empty(0, dtype=np.int64)
    return Generation(empty, np.empty(0, dtype=np.float32), empty, "abort")


def _sampled_logprobs(meta: dict[str, Any], token_ids: np.ndarray) -> np.ndarray:
    entries = meta.get("output_token_logprobs") or []
    if [entry[1] for entry in entries] != token_ids.tolist():
        problem = f"SGLang returned logprobs of other tokens than it sampled ({len(entries)} for {len(token_ids)})"
        raise EngineError(problem, code="engine-version", remedy="install a supported version")
    return np.asarray([entry[0] for entry in entries], dtype=np.float32)


def _supports(meta: dict[str, Any], count: int) -> Supports:
    if not count:
        return Supports.whole(0)
    entries = np.array([[entry[:2] for entry in row] for row in meta["output_top_logprobs"]], np.float64)
    return supports_of(entries[:, :, 1], entries[:, :, 0], "SGLang")


def _routes(meta: dict[str, Any], dimensions: ModelDimensions) -> dict[str, np.ndarray]:
    rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
    rows = rows.reshape(-1, dimensions.num_layers, dimensions.moe_top_k)
    return {"routes": rows[:, dimensions.expert_layers.start :].astype(np.int16)}


def _prompt_logprobs(meta: dict[str, Any]) -> np.ndarray | None:
    """Return logprobs from position 1 on; ``None`` if the prompt never ran."""
    entries = meta.get("input_token_logprobs")
    if not entries:
        return None
    return np.asarray([entry[0] for entry in entries[1:]], dtype=np.float32)
