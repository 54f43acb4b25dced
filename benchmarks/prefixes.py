"""Compare steps with and without shared prompts: ``python -m benchmarks.prefixes``.

One trainer rank, one process per row of the table. Both kinds of packs are trained in turns, in alternating order, and
the ratio is the median over the pairs. Time is processor time of forward and backward on one thread, so that other work
on the machine hardly matters. Memory is what autograd keeps between them, without weights. The gradient norms must be
equal.

Goals: 0.40 of the time and 0.45 of the memory if sharing leaves 0.30 of the tokens; 1.05 of the time if almost nothing
can be shared.
"""

import json
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import heading, met, parser, publish, table
from benchmarks.trainer.measure import in_process
from benchmarks.trainer.sides import free_port
from slime_like.algorithms import pack_sequences, real_tokens
from slime_like.config import RunConfig
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import RankPlacement, load_backend
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory

_HUNDRED_MILLION = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {"tiny": ({}, 4, 11), "100m": (_HUNDRED_MILLION, 1, 5)}
"""Maps each name to differences from the tiny Qwen3's sizes, groups per step, and pairs."""
SIDES = ("megatron", "fsdp")


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of prompt and response, samples per prompt, and the bounds on time and memory."""

    prompt: int
    response: int
    samples: int
    most_time: float
    most_memory: float


SHAPES = (Shape(256, 64, 8, 0.40, 0.45), Shape(16, 256, 4, 1.05, 1.05))


@dataclass(frozen=True, slots=True)
class Ratios:
    """Ratios of the values with sharing to those without."""

    time: float
    memory: float
    tokens: float
    copied_s: float


class _Kept:
    """Counts the storages that autograd keeps, except the storages of ``weights``."""

    def __init__(self, weights: set[int]) -> None:
        self._weights = weights
        self._storages: dict[int, torch.UntypedStorage] = {}

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._weights:
            self._storages[storage._cdata] = storage
        return tensor

    @property
    def nbytes(self) -> int:
        """Return the bytes. Call it after the step, when FSDP has freed its gathered weights."""
        return sum(storage.nbytes() for storage in self._storages.values())


def measure(directory: Path, model: str, side: str, shape: Shape) -> Ratios:
    """Measure one row of the table."""
    warnings.simplefilter("ignore")  # Megatron warns of packages that are not installed
    sizes, groups, pairs = MODELS[model]
    if not directory.exists():
        make_tiny_model(directory, dtype="float32", max_position_embeddings=4096, **sizes)
    threads = {"cpu_threads": 1, "target_tokens_per_batch": 65536}
    config = RunConfig(
        run_dir=directory / "run",
        model={"path": directory, "dtype": "float32"},
        # A learning rate so small that all steps compute the same.
        trainer={"backend": side, "share_prefixes": "prompts", "optimizer": {"lr": 1e-12}, **threads},
    )
    vocabulary = json.loads((directory / "config.json").read_text())["vocab_size"]
    rows = _rows(shape, groups, vocabulary)
    copied, shared = pack_sequences(rows), pack_sequences(rows, sharing="prompts")
    torch.set_num_threads(1)
    trainer = load_backend(side)(config, RankPlacement(0, 1, 0, "127.0.0.1", free_port()))
    trainer.setup()
    norms, kept = [], []
    for pack in (copied, shared, copied, shared):
        storages = _Kept(_storages(trainer))
        with torch.autograd.graph.saved_tensors_hooks(storages.keep, lambda tensor: tensor):
            norms.append(_step(trainer, pack)[1])
        kept.append(storages.nbytes)
    if abs(norms[1] / norms[0] - 1) > 1e-3:
        raise RuntimeError(f"gradient norms {norms[0]} and {norms[1]} differ: the two sides did not compute the same")
    seconds: list[dict[str, float]] = []
    for pair in range(pairs):
        both = [("copied", copied), ("shared", shared)][:: 1 if pair % 2 else -1]
        seconds.append({name: _step(trainer, pack)[0] for name, pack in both})
    trainer.shutdown()
    return Ratios(
        time=statistics.median(each["shared"] / each["copied"] for each in seconds),
        memory=kept[3] / kept[2],
        tokens=real_tokens([shared]) / real_tokens([copied]),
        copied_s=statistics.median(each["copied"] for each in seconds),
    )


def _rows(shape: Shape, groups: int, vocabulary: int) -> list[ScoredTrajectory]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for group in range(groups):
        prompt = torch.randint(8, vocabulary, (shape.prompt,), generator=generator)
        for sample in range(shape.samples):
            response = torch.randint(8, vocabulary, (shape.response,), generator=generator)
            bare = ScoredTrajectory.unrewarded(f"{group}-{sample}", prompt, response, group_id=group)
            logprobs, advantage = -torch.rand(shape.response, generator=generator), torch.randn((), generator=generator)
            rows.append(replace(bare, logprobs=logprobs, advantages=advantage))
    return rows


def _storages(trainer: Any) -> set[int]:
    modules = getattr(trainer, "chunks", None) or [trainer.model]
    return {p.untyped_storage()._cdata for module in modules for p in module.parameters()}


def _step(trainer: Any, pack: PackedTrajectory) -> tuple[float, float]:
    """Return processor seconds of forward and backward, and the gradient norm."""
    pack.old_logprobs = None  # on-policy: uses the forward pass's own
    denominator = float(pack.targets.numel())
    started = time.process_time()
    trainer.begin_step(denominator, real_tokens([pack]))
    trainer.accumulate([pack], last=True)
    seconds = time.process_time() - started
    return seconds, float(trainer.finish_step(denominator).grad_norm)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    options, head, rows = arguments.parse_args(), heading(), []
    columns = "model, trainer, prompt + samples x response | time | memory | tokens | goals | | without sharing (ms)"
    with tempfile.TemporaryDirectory() as directory:
        for model, side, shape in product(options.models, options.sides, SHAPES):
            found = in_process(measure, Path(directory) / model, model, side, shape)
            assert found is not None
            goals = f"{shape.most_time:.2f}, {shape.most_memory:.2f}"
            is_met = met(found.time <= shape.most_time and found.memory <= shape.most_memory)
            ratios = (f"{ratio:.2f}" for ratio in (found.time, found.memory, found.tokens))
            case = f"{model}, {side}, {shape.prompt} + {shape.samples} x {shape.response}"
            rows.append((case, *ratios, goals, is_met, f"{1000 * found.copied_s:.0f}"))
            publish(f"{head}\n\n{table(columns, rows)}", options.result)


if __name__ == "__main__":
    main()
