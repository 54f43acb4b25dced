"""What Megatron-core would compile at import is compiled at its first call, once."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from backends.megatron import deferred_compile


def test_a_rank_imports_no_compiler() -> None:
    code = "import sys, backends.megatron.trainer; print('torch._inductor' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False"]


def test_the_first_call_compiles_with_the_options_given(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, dict[str, Any]]] = []

    def record(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled.append((function.__name__, options))
        return function

    monkeypatch.setattr(torch, "compile", record)
    with deferred_compile():

        @torch.compile
        def plain(x: int) -> int:
            return x + 1

        @torch.compile(dynamic=True)
        def fused(x: int, scale: int = 2) -> int:
            """Words."""
            return x * scale

    assert torch.compile is record
    assert compiled == []
    assert [fused(2, scale=5), fused(3), plain(1)] == [10, 6, 2]
    assert compiled == [("fused", {"dynamic": True}), ("plain", {})]
    assert fused.__doc__ == "Words."
