"""Draws of tokens, SGLang's sampler, and texts that end a response."""

import random
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.drawing import Limits, draw, uniforms
from rollout.requests import StopTexts
from rollout.transformers.samples import Sample
from slime_like.examples.tiny_model import byte_tokenizer
from slime_like.interfaces import SamplingParams
from tests.parallel.strict import StrictDevice, WaitsForDevice
from tests.unit.agents.histories import PLAIN, tokenizer

ROWS, VOCABULARY = 37, 1003


@pytest.fixture(scope="module")
def logprobs() -> Tensor:
    logits = 4 * torch.randn((ROWS, VOCABULARY), generator=torch.Generator().manual_seed(0))
    return logits.log_softmax(-1)


@pytest.fixture(scope="module")
def numbers() -> Tensor:
    found = uniforms(torch.arange(ROWS) * 1_000_003, torch.arange(ROWS))
    found[0], found[1] = 0.0, 1 - 2**-53
    return found


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 36, 37])
def test_chunks_draw_the_same_as_the_whole_batch(logprobs: Tensor, numbers: Tensor, truncated: bool, rows: int) -> None:
    """A chunk has at least one row."""
    top_ks, top_ps = torch.arange(1, ROWS + 1), torch.linspace(0.2, 1.0, ROWS)
    limits = Limits(top_ks, top_ps, torch.linspace(0.0, 0.3, ROWS)) if truncated else None
    whole = draw(logprobs, numbers, limits)
    assert torch.equal(draw(logprobs, numbers, limits, chunk_bytes=rows * VOCABULARY * 8 + 7), whole)
    assert torch.equal(draw(logprobs, numbers, limits, chunk_bytes=1), whole)


def test_draw_inverts_the_cumulative_distribution(logprobs: Tensor, numbers: Tensor) -> None:
    cumulative = np.exp(logprobs.numpy().astype(np.float64)).cumsum(axis=1)
    wanted = [
        int(np.searchsorted(row, min(u * row[-1], np.nextafter(row[-1], 0)), side="right"))
        for row, u in zip(cumulative, numbers.tolist(), strict=True)
    ]
    assert draw(logprobs, numbers, None, chunk_bytes=5 * VOCABULARY * 8).tolist() == wanted


def test_logprobs_over_supports(logprobs: Tensor, numbers: Tensor) -> None:
    """Only rows that ask for it change. The tokens are the same."""
    limits = Limits(torch.full((ROWS,), 40), torch.full((ROWS,), 0.9), torch.full((ROWS,), 0.02))
    supported, given = torch.arange(ROWS) % 3 > 0, logprobs.clone()
    tokens = draw(given, numbers, limits, supported, chunk_bytes=5 * VOCABULARY * 8)
    assert torch.equal(tokens, draw(logprobs, numbers, limits))
    assert torch.equal(given[~supported], logprobs[~supported])
    for row in supported.nonzero()[:, 0].tolist():
        ordered = np.sort(np.exp(logprobs[row].double().numpy()))[::-1]
        ordered = ordered[ordered >= 0.02 * ordered[0]][:40]
        count = int((np.cumsum(ordered) - ordered < 0.9 * ordered.sum()).sum())
        found = given[row].exp()
        assert found[tokens[row]] > 0 and int((found > 0).sum()) == count
        assert found.sum().item() == pytest.approx(1.0, abs=1e-5)
        np.testing.assert_allclose(np.sort(found)[::-1][:count], ordered[:count] / ordered[:count].sum(), rtol=1e-4)


def test_temporaries_are_bounded_by_the_chunk(logprobs: Tensor, numbers: Tensor) -> None:
    """There is no float64 tensor of the whole batch."""
    largest: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.dtype == torch.float64:
                largest.append(result.nbytes)
            return result

    with Watch():
        draw(logprobs, numbers, None, chunk_bytes=4 * VOCABULARY * 8)
    assert max(largest) == 4 * VOCABULARY * 8


BATCH, TOKENS = 5, 101


class _Sampler:
    """Stand-in for SGLang's base class, and for its logprob processor, which runs after the draw."""

    def __init__(self) -> None:
        self.output_logprob_processor = self
        self.logprobs: Tensor | None = None

    def _preprocess_logits(self, logits: Tensor, info: Any) -> Tensor:
        return logits

    def compute_logprobs(self, logprobs: Tensor, *_: Any) -> Any:
        self.logprobs = logprobs
        return SimpleNamespace(write_output_to=lambda output: None)


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the sampler without importing SGLang, which takes seconds and may not be installed."""
    package = ModuleType("sglang.srt.layers.sampler")
    package.Sampler = _Sampler  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.delitem(sys.modules, "rollout.sglang.sampler", raising=False)
    from rollout.sglang.sampler import SeededSampler

    yield SeededSampler()
    sys.modules.pop("rollout.sglang.sampler", None)


def info(min_p: float = 0.0, top_k: int = TOKENS, greedy: bool = False) -> Any:
    return SimpleNamespace(
        temperatures=torch.ones(BATCH, 1),
        top_ks=torch.full((BATCH,), 1 if greedy else top_k, dtype=torch.int32),
        top_ps=torch.ones(BATCH),
        min_ps=torch.full((BATCH,), min_p),
        is_all_greedy=greedy,
        need_top_k_sampling=top_k < TOKENS,
        need_top_p_sampling=False,
        need_min_p_sampling=min_p > 0,
        sampling_seed=torch.arange(BATCH),
    )


def forward(sampler: Any, sampling: Any, numbers: list[int]) -> Tensor:
    logits = 3 * torch.randn((BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
    output = SimpleNamespace(next_token_logits=logits)
    tokens: Tensor = sampler.forward(output, sampling, True, numbers, [[]] * BATCH, torch.arange(BATCH))
    return tokens


@pytest.mark.parametrize("numbers", [[0] * BATCH, [0, 20, 0, 20, 20]], ids=["evaluation", "supports"])
@pytest.mark.parametrize(
    "options", [{}, {"top_k": 20}, {"top_k": 20, "min_p": 0.02}, {"greedy": True}], ids=["whole", "top_k", "min_p", "0"]
)
def test_host_never_waits(sampler: Any, options: dict[str, Any], numbers: list[int]) -> None:
    sampling = info(**options)
    with StrictDevice() as device:
        tokens = forward(sampler, sampling, numbers)
    assert device.watched > 10
    logprobs = sampler.logprobs
    assert tokens.dtype == torch.int32 and torch.isfinite(logprobs.gather(1, tokens[:, None].long())).all()
    cut = "top_k" in options
    for row, number in zip(logprobs, numbers, strict=True):
        assert row.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
        assert (int(row.isfinite().sum()) <= 20) is (cut and number > 0)


def test_device_detects_a_copy_that_waits(sampler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails for flags copied from memory that is not pinned."""
    module = sys.modules["rollout.sglang.sampler"]
    monkeypatch.setattr(module, "_wanted", lambda numbers, device: torch.tensor(numbers, device=device) > 0)
    with StrictDevice(), pytest.raises(WaitsForDevice):
        forward(sampler, info(top_k=20), [20] * BATCH)


TOKENIZERS = {"bytes": byte_tokenizer(), "merges": tokenizer(PLAIN)}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("stop", ["a", "</a>", "日本", "\n\n", "<eos>", "é!"])
def test_the_first_token_that_completes_a_text_ends_the_response(kind: str, stop: str) -> None:
    """Compared with a search in the whole text, after every token."""
    draw, used = random.Random(3), TOKENIZERS[kind]
    texts = StopTexts(used)
    pieces = [*stop, stop[1:], stop[:-1], "x", "日", " ", stop]
    ended = 0
    for _ in range(25):
        written = "".join(draw.choices(pieces, k=12))
        tokens = used.encode(written, add_special_tokens=False)
        sampling = SamplingParams(stop=("not this", stop), max_new_tokens=len(tokens))
        sample = Sample([1], sampling, frozenset(), random.Random(0), stop_texts=texts)
        while sample.finish_reason is None:
            sample.append(tokens[len(sample.token_ids)], -1.0, 0)
        whole = (end for end in range(1, len(tokens) + 1) if stop in used.decode(tokens[:end]))
        end = next(whole, None)
        assert (len(sample.token_ids), sample.finish_reason) == ((end, "stop") if end else (len(tokens), "length"))
        ended += end is not None
    assert ended > 0
