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

from slime_like.algorithms.head import fused_logprobs

TOKENS, VOCABULARY, WIDTH = 4096, 32_000, 16


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
