"""Measure this device's limits: products, copies, registration. ``python -m benchmarks.first_light.ceilings``."""

import mmap
import time
from collections.abc import Callable

import torch

from benchmarks.trainer.work import matmul_ceiling

_GIB = 1 << 30


def main() -> None:
    """Print one line of figures."""
    if torch.cuda.is_available():
        _on_device()
    else:
        source, target = (torch.ones(_GIB // 16) for _ in range(2))
        copied = 2 * source.nbytes / _seconds(lambda: target.copy_(source))
        product = matmul_ceiling(torch.device("cpu"), torch.float32)
        print(f"figures: float32 product {product / 1e12:.2f} TFLOP/s, copy {copied / 1e9:.0f} GB/s")


def _on_device() -> None:
    device = torch.device("cuda")
    source, target = (torch.ones(4 * _GIB, dtype=torch.uint8, device=device) for _ in range(2))
    copied = 2 * source.nbytes / _seconds(lambda: target.copy_(source))
    pinned = torch.ones(_GIB, dtype=torch.uint8).pin_memory()
    there = pinned.nbytes / _seconds(lambda: target[:_GIB].copy_(pinned, non_blocking=True))
    back = pinned.nbytes / _seconds(lambda: pinned.copy_(target[:_GIB], non_blocking=True))
    product = matmul_ceiling(device, torch.bfloat16)
    small = torch.ones(8, device=device)
    launch = _seconds(lambda: [small.add_(1) for _ in range(1000)]) / 1000
    fresh, touched, freed = _registration()
    print(
        f"figures: bf16 product {product / 1e12:.0f} TFLOP/s, HBM copy {copied / 1e9:.0f} GB/s (read and written), "
        f"pinned to device {there / 1e9:.1f} GB/s, back {back / 1e9:.1f} GB/s, launch {launch * 1e6:.1f} us, "
        f"cudaHostRegister {fresh:.2f} s/GiB of new pages, {touched:.2f} s of touched ones, unregister {freed:.2f} s"
    )


def _registration() -> tuple[float, float, float]:
    """Return seconds per GiB for registering new pages, registering used pages, and unregistering."""
    cudart = torch.cuda.cudart()
    found = []
    for is_touched in (False, True):
        memory = torch.frombuffer(mmap.mmap(-1, _GIB), dtype=torch.uint8)
        if is_touched:
            memory.fill_(1)
        started = time.perf_counter()
        torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        found.append(time.perf_counter() - started)
        started = time.perf_counter()
        torch.cuda.check_error(cudart.cudaHostUnregister(memory.data_ptr()))
        freed = time.perf_counter() - started
    return found[0], found[1], freed


def _seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the shortest of some runs after a warm-up."""
    best = float("inf")
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    main()
