"""Adaptations of Megatron to a CPU leave no trace and name missing symbols; nothing is compiled on import."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random

from backends.megatron import defer_compile
from backends.megatron.cpu_runtime import megatron_runtime
from backends.megatron.versions import Patch, apply_patches
from slime_like.errors import TrainerError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the adaptations are inactive if CUDA is available")


def test_literal_cuda_devices_become_the_cpu_only_inside() -> None:
    tracker, current_device = random.CudaRNGStatesTracker, torch.cuda.current_device
    with megatron_runtime():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.ones(2).cuda().to("cuda").to(torch.device("cuda", 0), torch.float64).device.type == "cpu"
        assert torch.empty(1, pin_memory=True).device.type == "cpu"
        assert random.CudaRNGStatesTracker is not tracker
    assert random.CudaRNGStatesTracker is tracker and torch.cuda.current_device is current_device
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


def test_nothing_is_left_behind() -> None:
    """Includes nested contexts and an exit by an error."""
    before = dict(vars(torch)), dict(vars(torch.Tensor)), dict(vars(torch.cuda))
    with pytest.raises(ZeroDivisionError), megatron_runtime():
        with megatron_runtime():
            assert torch.zeros is not before[0]["zeros"]
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        raise ZeroDivisionError
    assert (dict(vars(torch)), dict(vars(torch.Tensor)), dict(vars(torch.cuda))) == before


def test_torch_script_compiles_inside_like_outside() -> None:
    """ring-flash-attn, which the first micro-batch imports, uses it."""

    def zeros_like_its_shape(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device) + torch.empty_like(x).to(torch.float32).fill_(0)

    with megatron_runtime():
        inside = torch.jit.script(zeros_like_its_shape)
    assert torch.equal(inside(torch.ones(2)), torch.jit.script(zeros_like_its_shape)(torch.ones(2)))


def test_a_device_context_that_is_first_used_inside_works_and_a_rank_imports_no_compiler() -> None:
    """Runs in a separate process, because torch caches the functions that such a context applies to."""
    first_use = (
        "import sys, torch; from backends.megatron.cpu_runtime import megatron_runtime\n"
        "with megatron_runtime(on_meta=True), torch.device('meta'):\n"
        "    assert torch.empty(2).is_meta and torch.zeros(2, device='cuda').is_meta\n"
        "with torch.device('meta'):\n"
        "    assert torch.ones(2).is_meta\n"
        "import backends.megatron.trainer\n"
        "assert 'torch._inductor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", first_use], check=True, timeout=120)


def test_named_random_states_advance_separately_from_the_default_one() -> None:
    with megatron_runtime():
        tracker = random.CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 5)
        torch.manual_seed(0)
        expected_outside = torch.rand(2)
        torch.manual_seed(0)
        with tracker.fork("model-parallel-rng"):
            first = torch.rand(1)
        with tracker.fork("model-parallel-rng"):
            second = torch.rand(1)
        assert torch.equal(torch.rand(2), expected_outside)
        assert not torch.equal(first, second)
        with pytest.raises(TrainerError, match="added twice"):
            tracker.add("model-parallel-rng", 6)


def test_a_missing_symbol_is_named_with_the_version() -> None:
    expected = r"no_such_function does not exist in megatron-core \d+\.\d+.*install"
    with pytest.raises(TrainerError, match=expected), apply_patches(Patch(random, "no_such_function", None)):
        pass


# ------------------------------------------------------------------------------------------------- deferred compilation
def test_the_first_call_compiles_with_the_given_options(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, dict[str, Any]]] = []

    def record(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled.append((function.__name__, options))
        return function

    monkeypatch.setattr(torch, "compile", record)
    with defer_compile():

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
