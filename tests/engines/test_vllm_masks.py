"""Supports that vLLM returns on a GPU, built with vLLM's own containers, without its kernel."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slime_like.errors import EngineError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import GenerationRequest, PromptInput, SamplingParams
from slime_like.models.dimensions import ModelDimensions
from tests.support.rejections import Rejects

VOCABULARY = 264
TOKENS = [7, 3, 99]
SUPPORTS = [[3, 7, 11], [3], list(range(0, 200, 3))]
"""One support per token. The last one is wider than the compact rows below, as with ties."""
DRAWN = SamplingParams(top_k=50, max_new_tokens=8)


def completion(supports: list[list[int]] | None, tokens: list[int] = TOKENS, **fields: Any) -> Any:
    """Build an output like vLLM's output processor: per step, this request's slice of a batch of two."""
    from vllm.outputs import CompletionOutput, SamplingMask
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    from rollout.vllm.compact_logprobs import CompactLogprobs

    chunks: list[list[int]] = []
    for kept in supports or ():
        batch = [[5], kept]
        ids, bits = torch.zeros(2, 50, dtype=torch.int32), np.zeros((2, VOCABULARY), np.uint8)
        for row, those in enumerate(batch):
            ids[row, : len(those[:50])] = torch.tensor(those[:50], dtype=torch.int32)
            bits[row, those] = 1
        packed = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little"))
        counts = torch.tensor([len(those) for those in batch], dtype=torch.int32)
        lists = SamplingMaskTensors(ids, packed, counts, VOCABULARY).tolists()
        chunks += lists.slice_request(1, 1).to_nested_list()
    logprobs = CompactLogprobs()
    for token in tokens:
        logprobs.append_fast([token], [-0.5], iter((1,)), (None,))
    mask = None if supports is None else SamplingMask(chunks)
    own: dict[str, Any] = {"cumulative_logprob": None, "finish_reason": "length", "sampling_mask": mask} | fields
    return CompletionOutput(index=0, text="", token_ids=tokens, logprobs=logprobs, **own)


def generation(sample: Any, sampling: SamplingParams) -> Any:
    from vllm.outputs import RequestOutput

    from rollout.vllm.sampling import generations

    output = RequestOutput("a", None, [1], None, [sample], finished=True)
    dimensions: Any = SimpleNamespace(expert_layers=range(1, 3))
    (found,) = generations(GenerationRequest("a", PromptInput([1]), sampling), output, 4, dimensions, masks=True)
    return found


def test_masks_become_supports() -> None:
    found = generation(completion(SUPPORTS), DRAWN)
    assert [ids.tolist() for ids in found.supports] == SUPPORTS
    assert found.logprobs.tolist() == [-0.5] * 3 and found.weight_versions.tolist() == [4] * 3


@pytest.mark.parametrize("training", [True, False])
def test_routes_of_layers_with_experts(training: bool) -> None:
    rows = np.arange(3 * 3 * 2, dtype=np.uint8).reshape(3, 3, 2)
    found = generation(completion(SUPPORTS, routed_experts=rows), replace(DRAWN, training=training)).fields
    assert {name: (routes.dtype, routes.tolist()) for name, routes in found.items()} == (
        {"routes": (np.int16, rows[:, 1:].tolist())} if training else {}
    )


def test_response_without_tokens() -> None:
    found = generation(completion(None, [], finish_reason="abort"), DRAWN)
    assert len(found.token_ids) == 0 and len(found.supports) == 0 and found.finish_reason == "abort"


def test_greedy_response_has_nan_logprobs() -> None:
    found = generation(completion([[7], [3], [99]]), SamplingParams(temperature=0.0, training=False))
    assert found.supports is None and np.isnan(found.logprobs).all()


@pytest.mark.parametrize("supports", [None, SUPPORTS[:2], SUPPORTS[1:] + SUPPORTS[:1], [[7], [], [99]]])
def test_wrong_masks(supports: list[list[int]] | None, rejects: Rejects) -> None:
    with rejects(EngineError, "engine-version"):
        generation(completion(supports), DRAWN)


@pytest.mark.parametrize(
    ("sampling", "temperature", "top_k"),
    [
        (DRAWN, 1.0, 50),
        (SamplingParams(temperature=0.0, training=False), 1.0, 1),
        (SamplingParams(temperature=0.7, training=False), 0.7, VOCABULARY),
    ],
)
def test_requests_with_masks(tmp_path: Any, sampling: SamplingParams, temperature: float, top_k: int) -> None:
    """With masks, vLLM requires a temperature and a ``top_k`` above 0."""
    from rollout.vllm.sampling import sampling_params

    make_tiny_model(tmp_path)
    dimensions = ModelDimensions.from_checkpoint(tmp_path)
    found = sampling_params(GenerationRequest("a", PromptInput([1]), sampling, num_samples=3), dimensions, masks=True)
    assert (found.temperature, found.top_k, found.logprobs) == (temperature, top_k, 0)
    assert found.n == (3 if sampling.temperature else 1)
    unmasked = sampling_params(GenerationRequest("a", PromptInput([1]), sampling), dimensions)
    assert unmasked.logprobs == (66 if sampling.training else 0)
    assert unmasked.temperature == sampling.temperature
