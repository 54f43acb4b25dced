"""Measure time and memory of the head's forward and backward: ``python -m benchmarks.head [--device cuda]``.

Each row is one chunk size with one kind of row kernel. On CUDA the default shape is the head of Qwen3-4B in bfloat16
with a pack of 8,192 tokens; on a CPU it is a tiny head in float32. The fastest of ``--repeats`` runs is reported.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.report import heading, parser, publish, table
from slime_like.algorithms import head

SHAPES = {"cuda": (8192, 151_936, 2560), "cpu": (512, 2048, 64)}
CHUNKS = {"cuda": (308, 1024, 0, 2048), "cpu": (64, 0)}
"""0 is the default of ``fused_logprobs``."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. ``peak_bytes`` is the peak memory of CUDA tensors, including inputs and gradients."""

    chunk: int
    kernels: str
    ms: float
    tflops: float
    peak_bytes: int | None

    def cells(self, tokens: int) -> tuple[str, ...]:
        memory = "-" if self.peak_bytes is None else f"{self.peak_bytes / 2**30:.2f}"
        times = (f"{self.ms:.2f}", f"{self.ms / tokens:.6f}", f"{self.tflops:.2f}")
        return f"{self.chunk:,}", self.kernels, *times, memory


def main() -> None:
    """Print the table after every row."""
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--shape", type=int, nargs=3, metavar=("TOKENS", "VOCABULARY", "WIDTH"), help="by device if left out")
    add("--chunks", type=int, nargs="+", help="tokens per chunk; 0 is the default chunk")
    add("--entropy", action="store_true", help="entropies have a gradient, too")
    add("--repeats", type=int, default=5)
    options = arguments.parse_args()
    device = torch.device(options.device)
    shape = tuple(options.shape or SHAPES[device.type])
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    top = f"{heading()}\n{shape[0]:,} tokens, {shape[1]:,} x {shape[2]:,} weight, {named}."
    columns, found = "chunk (tokens) | kernels | ms | ms a token | TFLOP/s | peak (GiB)", list[tuple[str, ...]]()
    for row in rows(device, shape, options.chunks or CHUNKS[device.type], options.entropy, options.repeats):
        found.append(row.cells(shape[0]))
        publish(f"{top}\n\n{table(columns, found)}", options.result)


def rows(
    device: torch.device, shape: Sequence[int], chunks: Sequence[int], entropy: bool, repeats: int
) -> Iterator[Row]:
    """Measure every chunk size with each kind of kernel that ``device`` has."""
    tokens, vocabulary, width = shape
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    g = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, width, generator=g, device=device).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=g, device=device).mul_(width**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=g, device=device)
    for kernels in dict.fromkeys((head.row_kernels(device), "torch")):
        for chunk in chunks:
            taken = chunk or head.default_chunk(tokens, weight)
            with patch.object(head, "row_kernels", return_value=kernels):
                times = [_run(hidden, weight, targets, taken, entropy) for _ in range(repeats + 1)][1:]
            seconds = min(times)
            # Forward, forward again, and both gradients.
            flops = 4 * 2 * tokens * vocabulary * width
            yield Row(taken, kernels, seconds * 1e3, flops / seconds / 1e12, _peak(device))


def _run(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, entropy: bool) -> float:
    """Return the seconds of one forward and backward, with the device idle before and after."""
    hidden.grad = weight.grad = None
    _synchronize(hidden.device)
    start = time.perf_counter()
    logprobs, entropies = head.fused_logprobs(
        hidden, weight, targets, 0.7, vocab_size=len(weight), chunk_tokens=chunk, check_values=False
    )
    (logprobs.sum() + entropies.sum() if entropy else logprobs.sum()).backward()
    _synchronize(hidden.device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device) -> int | None:
    """Return the highest memory since the last call."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


if __name__ == "__main__":
    main()
