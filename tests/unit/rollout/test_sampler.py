"""SGLang's sampler on a device that rejects reads, so the host never waits for a token."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.strict import StrictDevice, WaitsForDevice

ROWS, VOCABULARY = 5, 101


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


def info(min_p: float = 0.0, top_k: int = VOCABULARY, greedy: bool = False) -> Any:
    return SimpleNamespace(
        temperatures=torch.ones(ROWS, 1),
        top_ks=torch.full((ROWS,), 1 if greedy else top_k, dtype=torch.int32),
        top_ps=torch.ones(ROWS),
        min_ps=torch.full((ROWS,), min_p),
        is_all_greedy=greedy,
        need_top_k_sampling=top_k < VOCABULARY,
        need_top_p_sampling=False,
        need_min_p_sampling=min_p > 0,
        sampling_seed=torch.arange(ROWS),
    )


def forward(sampler: Any, sampling: Any, numbers: list[int]) -> Tensor:
    logits = 3 * torch.randn((ROWS, VOCABULARY), generator=torch.Generator().manual_seed(0))
    output = SimpleNamespace(next_token_logits=logits)
    tokens: Tensor = sampler.forward(output, sampling, True, numbers, [[]] * ROWS, torch.arange(ROWS))
    return tokens


@pytest.mark.parametrize("numbers", [[0] * ROWS, [0, 20, 0, 20, 20]], ids=["evaluation", "supports"])
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
        forward(sampler, info(top_k=20), [20] * ROWS)
