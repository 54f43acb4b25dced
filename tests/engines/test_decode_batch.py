"""Rows that join and leave a decoding batch: each samples as if it were alone."""

import random

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from rollout.transformers.attention import GROUPED_SDPA, register
from rollout.transformers.decoding import DecodeBatch
from rollout.transformers.samples import Sample
from slime_like.interfaces import SamplingParams

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 512,
}


def _model(kind: str) -> PreTrainedModel:
    """With weights large enough that attention matters."""
    register()
    torch.manual_seed(0)
    if kind == "sliding window":
        config = MistralConfig(**_SIZES, num_key_value_heads=2, sliding_window=7)
        model = MistralForCausalLM._from_config(config, attn_implementation=GROUPED_SDPA)
    else:
        config = LlamaConfig(**_SIZES, num_key_value_heads=2 if kind == "grouped heads" else 4)
        model = LlamaForCausalLM._from_config(config, attn_implementation=GROUPED_SDPA)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model.double().eval().requires_grad_(False)


def _sample(prompt: list[int], new_tokens: int, seed: int, score: bool = False) -> Sample:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=new_tokens)
    return Sample(prompt, sampling, frozenset(), random.Random(seed), wants_prompt_logprobs=score)


def _teacher_forced(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    """(len(tokens) - 1,) logprobs of each token after those before it."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    logprobs = logits.float().log_softmax(dim=-1)
    return logprobs.gather(1, torch.tensor(tokens)[1:, None])[:, 0].numpy()


def _run(model: PreTrainedModel, arrivals: dict[int, list[Sample]], forget_at: frozenset[int] = frozenset()) -> None:
    """Step a batch; ``arrivals`` join before the step of that number."""
    batch, step = DecodeBatch(model, kernels=True), 0
    while batch.samples or step <= max(arrivals):
        batch.add(arrivals.get(step, []))
        if step in forget_at:
            batch.forget_cache()
        if batch.samples:
            batch.step(version=step)
        step += 1


def _arrivals(seed: int) -> dict[int, list[Sample]]:
    """Short and long prompts, some of them equal, that come and end at different times; buffers must grow twice."""
    choose = random.Random(seed)
    arrivals: dict[int, list[Sample]] = {}
    for number in range(12):
        prompt = [choose.randrange(61) for _ in range(choose.choice((1, 3, 30, 90)))]
        lengths = [choose.choice((1, 2, 9, 150)) for _ in range(3)]
        samples = [_sample(prompt, n, 100 * number + i, score=number % 3 == 0) for i, n in enumerate(lengths)]
        arrivals.setdefault(choose.choice((0, 0, 1, 5, 40, 160)), []).extend(samples)
    return arrivals


@pytest.mark.parametrize("kind", ["grouped heads", "one head each", "sliding window"])
def test_every_row_is_sampled_as_if_it_were_alone(kind: str) -> None:
    model = _model(kind)
    arrivals = _arrivals(seed=1)
    _run(model, arrivals, forget_at=frozenset({7, 45}))
    plain = type(model)._from_config(model.config, attn_implementation="eager").double().eval()
    plain.load_state_dict(model.state_dict())
    for sample in (sample for samples in arrivals.values() for sample in samples):
        assert len(sample.token_ids) == sample.sampling.max_new_tokens
        expected = _teacher_forced(plain, sample.context)
        prompt = len(sample.prompt) - 1
        np.testing.assert_allclose(sample.logprobs, expected[prompt:], atol=1e-4)  # norms compute in float32
        assert (sample.prompt_logprobs is None) == (not sample.wants_prompt_logprobs)
        if sample.prompt_logprobs is not None:
            np.testing.assert_allclose(sample.prompt_logprobs, expected[:prompt], atol=1e-4)


def test_neighbours_do_not_change_what_a_row_draws() -> None:
    model = _model("grouped heads")
    together, apart = _arrivals(seed=2), _arrivals(seed=2)
    _run(model, together)
    for sample in (sample for samples in apart.values() for sample in samples):
        _run(model, {0: [sample]})
    drawn = [[s.token_ids for samples in run.values() for s in samples] for run in (together, apart)]
    assert drawn[0] == drawn[1]


def test_a_row_that_ends_makes_room_for_a_longer_context() -> None:
    """Columns that only a row had used which has left are not kept, and a wider context than the batch's fits."""
    model = _model("grouped heads")
    arrivals = {0: [_sample([1] * 90, 2, 0), _sample([2], 200, 1)], 3: [_sample([3] * 120, 5, 2)]}
    batch = DecodeBatch(model, kernels=True)
    for step in range(200):
        batch.add(arrivals.get(step, []))
        batch.step(version=0)
    assert not batch.samples
    for sample in (*arrivals[0], *arrivals[3]):
        expected = _teacher_forced(model, sample.context)[len(sample.prompt) - 1 :]
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)
