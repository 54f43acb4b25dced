"""What Megatron-core would compile at import is compiled at its first call, and is the same function."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch._dynamo.testing import CompileCounter

from backends.megatron.deferred_compile import deferred_compile


def test_a_rank_imports_no_compiler() -> None:
    code = "import sys, backends.megatron.trainer; print('torch._inductor' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False"]


def test_the_first_call_compiles_with_the_options_given() -> None:
    at_once, counter = torch.compile, CompileCounter()
    with deferred_compile():

        @torch.compile(backend=counter)
        def fused(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
            """Its own words."""
            return x * scale + 1

    assert torch.compile is at_once
    assert counter.frame_count == 0
    assert torch.equal(fused(torch.arange(3.0), scale=3.0), torch.tensor([1.0, 4.0, 7.0]))
    assert torch.equal(fused(torch.arange(3.0), scale=3.0), torch.tensor([1.0, 4.0, 7.0]))
    assert counter.frame_count == 1
    assert fused.__doc__ == "Its own words."
