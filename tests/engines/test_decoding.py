"""Tokens decoded in batches against transformers' own forward of whole contexts, without a cache.

By kernels of ours, and by transformers' forward with our cache; each row samples as if it were alone."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from rollout.transformers.attention import GROUPED_SDPA, register
from rollout.transformers.decoding import DecodeBatch
from rollout.transformers.fused_decoder import FusedDecoder
from rollout.transformers.kv_cache import KeyValueCache
from rollout.transformers.plain_decoder import not_plain
from rollout.transformers.samples import Sample, draw_tokens
from slime_like.examples.tiny_model import tiny_config
from slime_like.interfaces import SamplingParams

_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {}),
    "mistral with a window": ("mistral", {"sliding_window": 6}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3 of odd sizes": ("qwen3", {"head_dim": 22, "hidden_size": 50, "intermediate_size": 37}),
    "one head each": ("qwen3", {"num_key_value_heads": 4}),
}


def _model(kind: str, attention: str = GROUPED_SDPA, **changes: Any) -> PreTrainedModel:
    """With weights so large that attention matters, and biases and norms that are not what they begin as."""
    register()
    family, of_kind = _KINDS.get(kind, (kind, {}))
    torch.manual_seed(0)
    config = tiny_config(family, **of_kind, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) if parameter.ndim == 1 else 4 * parameter)
    return model.eval().requires_grad_(False)


def _whole(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """(rows, n, V) logits by transformers' plainest attention, in one forward."""
    plain = type(model)._from_config(model.config, attn_implementation="eager").to(model.dtype).eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        return plain(input_ids=ids, use_cache=False).logits


def _teacher_forced(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """(len(tokens) - 1,) logprobs of each token after those before it."""
    ids = torch.tensor([tokens])
    return _whole(model, ids)[0, :-1].double().log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0]


def _prefilled(model: PreTrainedModel, ids: Tensor) -> KeyValueCache:
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    return KeyValueCache([cache], torch.arange(len(ids)), torch.full((len(ids),), ids.shape[1]))


def _ids(model: PreTrainedModel, rows: int, tokens: int) -> Tensor:
    return torch.randint(model.config.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", _KINDS)
def test_logits_are_those_of_the_whole_context(kind: str) -> None:
    model = _model(kind)
    assert not_plain(model) is None
    ids = _ids(model, rows=5, tokens=90)
    cache, decoder = _prefilled(model, ids[:, :3]), FusedDecoder(model)
    with torch.inference_mode():
        logits = torch.stack([decoder.logits(ids[:, n], cache) for n in range(3, 90)], dim=1)
    expected = _whole(model, ids)[:, 3:]
    assert expected.std() > 0.5  # of which 1e-5 is something
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("lengths", [(9, 2, 40, 1), (12, 12)], ids=str)
@pytest.mark.parametrize("kind", _KINDS)
def test_a_prefill_is_that_of_every_context_alone(kind: str, lengths: tuple[int, ...]) -> None:
    model, width = _model(kind), max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.int64), torch.zeros(len(lengths), width, dtype=torch.int64)
    contexts = [_ids(model, 1, length) for length in lengths]
    for row, context in enumerate(contexts):
        ids[row, width - context.shape[1] :], mask[row, width - context.shape[1] :] = context[0], 1
    decoder = FusedDecoder(model)
    with torch.inference_mode():
        every, cache = decoder.prefill(ids, mask, range(width))
        last, _ = decoder.prefill(ids, mask, (-1,))
    torch.testing.assert_close(last, every[:, -1:], rtol=1e-5, atol=1e-4)
    assert not every.isnan().any()
    for row, context in enumerate(contexts):
        columns = slice(width - context.shape[1], width)
        expected = _whole(model, context)[0]
        assert (every[row, columns] - expected).abs().max() <= 1e-5 * expected.abs().max()
        theirs = DynamicCache()
        with torch.no_grad():
            model(input_ids=context, past_key_values=theirs, use_cache=True)
        for ours, layer in zip(cache.layers, theirs.layers, strict=True):
            torch.testing.assert_close(ours.keys[row, :, columns], layer.keys[0], rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(ours.values[row, :, columns], layer.values[0], rtol=1e-5, atol=1e-4)


def _sample(prompt: list[int], new_tokens: int, seed: int = 0, score: bool = False) -> Sample:
    sampling = SamplingParams(max_new_tokens=new_tokens)
    return Sample(prompt, sampling, frozenset(), random.Random(seed), wants_prompt_logprobs=score)


def _run(
    model: PreTrainedModel, arrivals: dict[int, list[Sample]], kernels: bool = True, forget_at: tuple[int, ...] = ()
) -> DecodeBatch:
    """Step a batch; ``arrivals`` join before the step of that number."""
    batch, step = DecodeBatch(model, kernels), 0
    while batch.samples or step <= max(arrivals):
        batch.add(arrivals.get(step, []))
        if step in forget_at:
            batch.forget_cache()
        if batch.samples:
            batch.step(version=step)
        step += 1
    return batch


def _arrivals(seed: int) -> dict[int, list[Sample]]:
    """Short and long prompts, some of them equal, that come and end at different times; buffers must grow twice."""
    choose = random.Random(seed)
    arrivals: dict[int, list[Sample]] = {}
    for number in range(12):
        prompt = [choose.randrange(264) for _ in range(choose.choice((1, 3, 30, 90)))]
        lengths = [choose.choice((1, 2, 9, 150)) for _ in range(3)]
        samples = [_sample(prompt, n, 100 * number + i, score=number % 3 == 0) for i, n in enumerate(lengths)]
        arrivals.setdefault(choose.choice((0, 0, 1, 5, 40, 160)), []).extend(samples)
    return arrivals


@pytest.mark.parametrize(
    ("kind", "is_fused"),
    [(kind, True) for kind in ("llama", "mistral with a window", "qwen2", "qwen3")]
    + [(kind, False) for kind in ("llama", "mistral with a window", "one head each")],
)
def test_every_row_is_sampled_as_if_it_were_alone(kind: str, is_fused: bool) -> None:
    model = _model(kind)
    arrivals = _arrivals(seed=1)
    batch = _run(model if is_fused else model.double(), arrivals, forget_at=(7, 45))
    assert (batch._decoder is not None) is is_fused
    for sample in (sample for samples in arrivals.values() for sample in samples):
        assert len(sample.token_ids) == sample.sampling.max_new_tokens
        expected, prompt = _teacher_forced(model, sample.context), len(sample.prompt) - 1
        np.testing.assert_allclose(sample.logprobs, expected[prompt:], rtol=1e-5, atol=2e-5)
        assert (sample.prompt_logprobs is None) == (not sample.wants_prompt_logprobs)
        if sample.prompt_logprobs is not None:
            np.testing.assert_allclose(sample.prompt_logprobs, expected[:prompt], rtol=1e-5, atol=2e-5)


def test_neighbours_do_not_change_what_a_row_draws() -> None:
    model = _model("llama").double()
    together, apart = _arrivals(seed=2), _arrivals(seed=2)
    _run(model, together)
    for sample in (sample for samples in apart.values() for sample in samples):
        _run(model, {0: [sample]})
    drawn = [[s.token_ids for samples in run.values() for s in samples] for run in (together, apart)]
    assert drawn[0] == drawn[1]


def test_a_row_that_ends_makes_room_for_a_longer_context() -> None:
    """Columns that only a row had used which has left are not kept, and a wider context than the batch's fits."""
    model = _model("llama").double()
    arrivals = {0: [_sample([1] * 90, 2, 0), _sample([2], 200, 1)], 3: [_sample([3] * 120, 5, 2)]}
    _run(model, arrivals)
    for sample in (*arrivals[0], *arrivals[3]):
        expected = _teacher_forced(model, sample.context)[len(sample.prompt) - 1 :]
        np.testing.assert_allclose(sample.logprobs, expected, rtol=1e-5, atol=2e-5)


def test_changed_weights_are_used_at_once() -> None:
    """In place, as a weight update writes them, and as other storage."""
    model = _model("qwen3")
    ids = _ids(model, rows=3, tokens=8)
    decoder = FusedDecoder(model)
    for name, parameter in model.named_parameters():
        if "1" in name:
            parameter.mul_(1.5)
        elif "2" in name:
            parameter.data = parameter.data * 0.7
    cache = _prefilled(model, ids[:, :7])
    with torch.inference_mode():
        logits = decoder.logits(ids[:, 7], cache)
    expected = _whole(model, ids)[:, 7]
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_nan_in_any_weight_is_a_nan_in_the_logits() -> None:
    model = _model("qwen2")
    ids = _ids(model, rows=3, tokens=4)
    ids[:, 3] = 17
    decoder = FusedDecoder(model)
    for name, parameter in model.named_parameters():
        cache = _prefilled(model, ids[:, :3])
        place = (17, 5) if name == "model.embed_tokens.weight" else (0,) * parameter.ndim
        kept = parameter[place].item()
        parameter[place] = torch.nan
        with torch.inference_mode():
            assert decoder.logits(ids[:, 3], cache).isnan().any(dim=-1).all(), name
        parameter[place] = kept
    with torch.inference_mode():
        assert not decoder.logits(ids[:, 3], _prefilled(model, ids[:, :3])).isnan().any()


def test_kernels_can_be_turned_off() -> None:
    """Torch decodes and draws then, and samples the same."""
    model, drawn = _model("qwen3"), []
    for kernels in (True, False):
        drawn.append(_sample([1, 2, 3], 20))
        batch = _run(model, {0: [drawn[-1]]}, kernels)
        assert (batch._decoder is not None) is kernels
        assert (batch._draw is draw_tokens) is not kernels
    assert drawn[0].token_ids == drawn[1].token_ids
    np.testing.assert_allclose(drawn[0].logprobs, drawn[1].logprobs, rtol=1e-5, atol=2e-5)


class _OtherLinear(nn.Linear):
    pass


def test_other_models_are_left_to_transformers() -> None:
    replaced = _model("qwen3")
    replaced.model.layers[1].mlp.up_proj = _OtherLinear(128, 256, bias=False)
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    cases = {
        "Qwen3Moe": _model("qwen3_moe"),
        "DeepseekV3": _model("deepseek_v3", attention="sdpa"),
        "attn_implementation=eager": _model("qwen3", attention="eager"),
        "activation is gelu": _model("llama", hidden_act="gelu"),
        "type dynamic": _model("llama", rope_parameters=dynamic),
        "projection is a _OtherLinear": replaced,
        "float32": _model("qwen3").bfloat16(),
    }
    for reason, model in cases.items():
        assert reason in (not_plain(model) or "")
        sample = _sample([1, 2], 3)
        assert _run(model, {0: [sample]})._decoder is None
        assert len(sample.token_ids) == 3


@pytest.mark.parametrize(("threads", "hidden_size", "is_fused"), [(1, 512, True), (2, 512, False), (2, 128, True)])
def test_threads_are_not_left_idle_by_what_is_large(threads: int, hidden_size: int, is_fused: bool) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert (DecodeBatch(_model("llama", hidden_size=hidden_size), kernels=True)._decoder is not None) is is_fused
    finally:
        torch.set_num_threads(before)
