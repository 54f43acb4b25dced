"""Memory that a real rank takes in a step, by kind, and its comparison with the plan."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from backends.common.attention import packed_attention, prefixes
from backends.common.attention.kernels import CpuFlash
from backends.common.step.worst_batch import worst_packs
from backends.fsdp.parallel import shard_of
from backends.fsdp.trainer import FsdpTrainer
from backends.megatron.attention import context_layout_of
from backends.megatron.planning.estimate import planned_attention
from backends.megatron.planning.passes import WINDOWS_OF_STAGES
from backends.megatron.trainer import MegatronTrainer
from slime_like.algorithms.context import Layout
from slime_like.config import RunConfig
from slime_like.config.roles import POLICY
from slime_like.interfaces import RankPlacement, load_backend
from slime_like.interfaces.estimate import TrainerMemory
from slime_like.models.dimensions import ModelDimensions
from tests.parallel.allocations import Allocated, allocated_by
from tests.parallel.held import held_by, storage_bytes
from tests.parallel.tiny import tiny_config

GATHERED, SUMMED = "gathered", "summed"
NEAR = 0.1
FSDP_RANGES = {"FSDP::all_gather": GATHERED, "FSDP::pre_": GATHERED, "FSDP::post_backward": SUMMED}
"""FSDP's names of its work in a profile."""


@dataclass(frozen=True)
class Taken:
    """One rank's memory in bytes: held tensors by kind, everything held, and what phases add to it."""

    parameters: int
    gradients: int
    optimizer: int
    standing: int
    everything: int
    scoring: Allocated
    training: Allocated
    update: Allocated


def planned_config(backend: str, model: Path, run_dir: Path, **trainer: Any) -> RunConfig:
    """Return a configuration: for Megatron with sequences of 200 tokens, so activations dominate, and for FSDP with 40,
    so weights matter as much. Shared prompts are half as long as responses."""
    tokens = 600 if backend == "megatron" else 120
    prompt = tokens // 6 if trainer.get("share_prefixes") else 20
    dtype, lora = trainer.pop("dtype", "bfloat16"), trainer.pop("lora", {})
    config = tiny_config(
        model,
        run_dir,
        dtype=dtype,
        data={"max_prompt_tokens": prompt},
        rollout={"max_new_tokens": tokens // 3 - 1, "top_k": trainer.pop("top_k", -1)},
        trainer={"backend": backend, "target_tokens_per_batch": tokens, **trainer},
    )
    return RunConfig.model_validate({**dict(config), "model": {**dict(config.model), "lora": lora}})


def _layout_of(config: RunConfig) -> Layout:
    return context_layout_of(planned_attention(config.trainer, ModelDimensions.from_checkpoint(config.model.path)))


def measure_rank(placement: RankPlacement, config: RunConfig) -> Taken:
    """Measure the second of two steps of worst micro-batches. The first one creates permanent buffers."""
    fsdp = config.trainer.backend == "fsdp"
    packs = worst_packs(config, "contiguous" if fsdp else _layout_of(config))
    # FSDP sums with the last micro-batch, and a pipeline holds several. Otherwise there is one, because inputs of all
    # micro-batches would be in memory together.
    window = packs * (3 if fsdp else WINDOWS_OF_STAGES if config.trainer.parallel.pipeline > 1 else 1)
    trainer: Any = load_backend(config.trainer.backend)(config, placement)

    def train() -> None:
        trainer.begin_step()
        trainer.accumulate(window, last=True)

    def start() -> None:
        trainer.setup()
        train()
        trainer.finish_step(100.0)

    with waiting_for_gloo():
        everything = allocated_by(start).left
        scoring, training = allocated_by(lambda: trainer.score(packs)), allocated_by(train, FSDP_RANGES)
        held = _held_by_fsdp(trainer) if fsdp else _held_by_megatron(trainer)
        update = allocated_by(lambda: trainer.finish_step(100.0))
    trainer.shutdown()
    return Taken(*held, everything, scoring, training, update)


@contextmanager
def waiting_for_gloo() -> Iterator[None]:
    """Make collectives inside the block wait until gloo's threads have released their tensors."""
    work: Any = dist.Work
    original = work.wait

    def wait(*arguments: Any) -> Any:
        result = original(*arguments)
        deadline = time.monotonic() + 10
        time.sleep(0.001)
        while _gloo_runs():
            assert time.monotonic() < deadline, "gloo's threads are still running 10 s after the end of a collective"
            time.sleep(0.001)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "wait", wait)
        yield


def _gloo_runs() -> bool:
    """Return whether a thread of gloo's collectives runs or waits for a core, which takes a while on a busy machine."""
    return any("(pt_gloo_runloop) R" in stat.read_text() for stat in Path("/proc/self/task").glob("*/stat"))


def _held_by_megatron(trainer: MegatronTrainer) -> tuple[int, int, int, int]:
    held = held_by(trainer)
    standing = storage_bytes(parallel_state.get_global_memory_buffer().buffer.values())
    return held.parameter_bytes, held.gradient_bytes, held.optimizer_bytes, standing


def _held_by_fsdp(trainer: FsdpTrainer) -> tuple[int, int, int, int]:
    parameters = list(trainer.model.parameters())
    moments = [value for state in trainer.optimizer.moments.values() for value in state.values()]
    gradients = [shard_of(parameter.grad) for parameter in parameters if parameter.grad is not None]
    shards = [shard_of(parameter) for parameter in parameters]
    return storage_bytes(shards), storage_bytes(gradients), storage_bytes(moments), 0


def check_taken(
    backend: str,
    configs: dict[str, RunConfig],
    measured: Sequence[Sequence[Taken]],
    role: str = POLICY,
    exact: Sequence[str] = (),
) -> None:
    """Compare each kind of memory of every rank with the plan: the ``exact`` ones to the byte, others within a tenth.

    Plans are for a CPU's attention operator.
    """
    far = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (packed_attention, prefixes):
            patch.setattr(module, "kernel_for", lambda device: CpuFlash())
        planner = load_backend(backend).planner()
        for (name, config), ranks in zip(configs.items(), measured, strict=True):
            for rank, real in enumerate(ranks):
                for kind, (planned, found) in compared(planner.estimate(config, rank, role).memory, real).items():
                    if planned != pytest.approx(found, rel=0 if kind in exact else NEAR):
                        far.append(f"{name}, rank {rank}, {kind}: {planned} planned, {found} taken")
    assert not far


def compared(memory: TrainerMemory, taken: Taken) -> dict[str, tuple[int, int]]:
    """Return planned and taken bytes by kind. On a CPU, offloaded state is in the device's memory."""
    on_host = memory.host_optimizer_bytes // 4
    parameters, optimizer = memory.parameter_bytes or on_host, memory.optimizer_bytes or 2 * on_host
    gradients, window = memory.gradient_bytes or on_host, memory.window_gradient_bytes
    busy = memory.activation_bytes + memory.head_bytes
    training, scoring = taken.training.peak, taken.scoring.peak.total()
    found = {
        "parameters": (parameters, taken.parameters),
        "gradients": (gradients, taken.gradients),
        "optimizer state": (optimizer, taken.optimizer),
    }
    if memory.window_gradient_bytes or training[GATHERED]:  # FSDP
        whole = memory.gradient_bytes + window
        found |= {
            "gathered weights": (memory.communication_bytes, training[GATHERED]),
            "whole gradients": (whole, training[SUMMED]),
            "scoring": (memory.forward_bytes + memory.communication_bytes, scoring),
            "activations, head": (busy, training.total() - training[GATHERED] - training[SUMMED]),
        }
        peaks = memory.communication_bytes + whole + busy
        held = parameters + optimizer + memory.teacher_bytes
    else:
        found |= {
            "standing buffers": (memory.communication_bytes, taken.standing),
            "scoring": (memory.forward_bytes, scoring),
            "activations, head": (busy, training.total()),
            "parameters, optimizer step": (parameters + memory.update_bytes, parameters + taken.update.peak.total()),
        }
        peaks = max(busy, memory.update_bytes)
        held = parameters + gradients + optimizer + memory.communication_bytes + memory.teacher_bytes
    total = taken.everything + max(phase.peak.total() for phase in (taken.scoring, taken.training, taken.update))
    return found | {"total": (held + peaks, total)}
