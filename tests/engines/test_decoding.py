"""Tokens decoded in batches with our cache, compared with transformers' forward pass without a cache."""

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout.transformers.decoding import GROUPED_SDPA, DecodeBatch, register_grouped_sdpa
from rollout.transformers.samples import Sample
from rollout.transformers.scheduler import DecodeScheduler
from slime_like.examples.tiny_model import tiny_config
from slime_like.interfaces import RequestBatch, SamplingParams
from tests.support.acceptance import some_in_acceptance

_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {}),
    "mistral with a window": ("mistral", {"sliding_window": 6}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3 of odd sizes": ("qwen3", {"head_dim": 22, "hidden_size": 50, "intermediate_size": 37}),
    "qwen3_5_text": ("qwen3_5_text", {}),
    "one head each": ("qwen3", {"num_key_value_heads": 4}),
}
_IN_ACCEPTANCE = ("llama", "mistral", "mistral with a window", "qwen2", "qwen3", "one head each")


def _model(kind: str, attention: str = GROUPED_SDPA, **changes: Any) -> PreTrainedModel:
    """Return a model with large weights, so attention matters, and changed biases and norms."""
    register_grouped_sdpa()
    family, of_kind = _KINDS.get(kind, (kind, {}))
    torch.manual_seed(0)
    config = tiny_config(family, num_hidden_layers=2, **of_kind, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) if parameter.ndim == 1 else 4 * parameter)
    return model.eval().requires_grad_(False)


def _whole(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return logits (rows, n, V) with transformers' eager attention, in one forward pass."""
    plain = type(model)._from_config(model.config, attn_implementation="eager").to(model.dtype).eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        return plain(input_ids=ids, use_cache=False).logits


def _teacher_forced(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Return teacher-forced logprobs (len(tokens) - 1,)."""
    ids = torch.tensor([tokens])
    return _whole(model, ids)[0, :-1].double().log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0]


def _sample(prompt: list[int], new_tokens: int, seed: int = 0, score: bool = False) -> Sample:
    sampling = SamplingParams(max_new_tokens=new_tokens)
    return Sample(prompt, sampling, frozenset(), random.Random(seed), wants_prompt_logprobs=score)


def _run(model: PreTrainedModel, arrivals: dict[int, list[Sample]], forget_at: tuple[int, ...] = ()) -> None:
    """Step a batch. ``arrivals`` join before the step with their number."""
    batch, step = DecodeBatch(model), 0
    while batch.samples or step <= max(arrivals):
        batch.add(arrivals.get(step, []))
        if step in forget_at:
            batch.forget_cache()
        if batch.samples:
            batch.step(version=step)
        step += 1


def _arrivals(seed: int) -> dict[int, list[Sample]]:
    """Return short and long prompts, some equal, that start and end at different times. Buffers must grow twice."""
    choose = random.Random(seed)
    arrivals: dict[int, list[Sample]] = {}
    for number in range(12):
        prompt = [choose.randrange(264) for _ in range(choose.choice((1, 3, 30, 90)))]
        lengths = [choose.choice((1, 2, 9, 150)) for _ in range(3)]
        samples = [_sample(prompt, n, 100 * number + i, score=number % 3 == 0) for i, n in enumerate(lengths)]
        arrivals.setdefault(choose.choice((0, 0, 1, 5, 40, 160)), []).extend(samples)
    return arrivals


@pytest.mark.parametrize("kind", some_in_acceptance(_KINDS, _IN_ACCEPTANCE.__contains__))
def test_rows_are_independent(kind: str) -> None:
    model = _model(kind).double()
    arrivals = _arrivals(seed=1)
    _run(model, arrivals, forget_at=(7, 45))
    for sample in (sample for samples in arrivals.values() for sample in samples):
        assert len(sample.token_ids) == sample.sampling.max_new_tokens
        expected, prompt = _teacher_forced(model, sample.context), len(sample.prompt) - 1
        np.testing.assert_allclose(sample.logprobs, expected[prompt:], rtol=1e-5, atol=2e-5)
        assert (sample.prompt_logprobs is None) == (not sample.wants_prompt_logprobs)
        if sample.prompt_logprobs is not None:
            np.testing.assert_allclose(sample.prompt_logprobs, expected[:prompt], rtol=1e-5, atol=2e-5)


def test_draws_are_independent_of_the_batch() -> None:
    model = _model("llama").double()
    together, apart = _arrivals(seed=2), _arrivals(seed=2)
    _run(model, together)
    for sample in (sample for samples in apart.values() for sample in samples):
        _run(model, {0: [sample]})
    drawn = [[s.token_ids for samples in run.values() for s in samples] for run in (together, apart)]
    assert drawn[0] == drawn[1]


def test_the_numbers_of_a_batch_do_not_depend_on_when_its_requests_arrive() -> None:
    """Bit for bit, in float32, with more samples than fit at once. A canceled request delays nobody."""
    model, count = _model("qwen3"), 16
    prompts = [sample.prompt for samples in _arrivals(seed=3).values() for sample in samples][:count]

    def logprobs(order: Sequence[int], gap_s: float, canceled: int | None = None) -> list[list[float]]:
        scheduler, found = DecodeScheduler(model, max_batch_size=24), {}
        for at in order:
            samples = [_sample(prompts[at], 5 + at, seed=2 * at + number) for number in range(2)]
            found[at] = scheduler.submit(f"r{at}", samples, RequestBatch("step", count, at))
            if at == canceled:
                scheduler.abort(f"r{at}")
                assert found.pop(at).result(timeout=20)[0].finish_reason == "abort"
            time.sleep(gap_s)
        generations = [one for at in sorted(found) for one in found[at].result(timeout=20)]
        assert scheduler.stop(timeout_s=20)
        return [one.logprobs.tolist() for one in generations]

    together = logprobs(range(count), gap_s=0.0)
    assert logprobs(range(count), gap_s=0.004) == together
    assert logprobs([*range(9, count), *range(9)], gap_s=0.0) == together
    assert len(logprobs(range(count), gap_s=0.0, canceled=7)) == 2 * (count - 1)
