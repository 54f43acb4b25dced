"""What the head takes at its peak, counted in bytes of tensors that are alive at once.

Not covered: scratch of matrix libraries, and what an allocator keeps of freed memory.
"""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slime_like.algorithms.head import default_chunk, fused_logprobs

TOKENS, VOCABULARY, WIDTH = 2560, 16_000, 16


class LiveBytes(TorchDispatchMode):
    """Counts the storage of every tensor made inside, until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, sum(self._sizes.values()))
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self._sizes.pop, storage._cdata)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward_take_at_most_an_eighth_of_the_logits(dtype: torch.dtype) -> None:
    """Besides weight, hidden states and their gradients (which are summed in float32), logprob and entropy alike."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    temperatures = torch.ones(TOKENS, dtype=torch.float64)
    with LiveBytes() as live:
        logprobs, entropy = fused_logprobs(hidden, weight, targets, temperatures, vocab_size=VOCABULARY)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
    gradients = 4 * (hidden.numel() + weight.numel())
    logits = 4 * TOKENS * VOCABULARY
    assert logits / 40 < live.peak - gradients <= logits / 8


@pytest.mark.parametrize(("dtype", "factor", "per_logit"), [(torch.bfloat16, 0.0, 6), (torch.float32, 0.1, 8)])
def test_a_device_holds_the_logits_of_one_chunk(dtype: torch.dtype, factor: float, per_logit: int) -> None:
    """Shapes stand for a device. Chunks are of 1,766 tokens, 1 GiB of float32 logits."""
    tokens, vocabulary, width = 4096, 152_000, 1024
    with torch.device("meta"):
        hidden, weight = (torch.ones(n, width, dtype=dtype, requires_grad=True) for n in (tokens, vocabulary))
        targets, temperatures = torch.ones(tokens, dtype=torch.int64), torch.ones(tokens)
    with LiveBytes() as live:
        logprobs, entropy = fused_logprobs(
            hidden, weight, targets, temperatures, vocab_size=vocabulary, check_values=False
        )
        (logprobs.sum() + (factor * entropy.sum() if factor else 0)).backward()
    chunk = default_chunk(tokens, weight)
    of_size = (hidden.element_size() + 4) * (hidden.numel() + weight.numel())  # its views are counted, and gradients
    assert chunk == 1766 and per_logit - 0.1 < (live.peak - of_size) / (chunk * vocabulary) < per_logit + 0.1


@pytest.mark.parametrize(
    ("tokens", "columns", "device", "expected"),
    [
        (8192, 151_936, "meta", 1766), (8192, 18_992, "meta", 2048), (8192, 262_144, "meta", 1024),
        (8, 0, "meta", 2048),
        (8192, 49_152, "cpu", 410), (30_000, 49_152, "cpu", 1024), (2048, 512, "cpu", 512), (10, 49_152, "cpu", 128),
    ],
)  # fmt: skip
def test_default_chunks(tokens: int, columns: int, device: str, expected: int) -> None:
    assert default_chunk(tokens, torch.empty(columns, 1, device=device)) == expected
