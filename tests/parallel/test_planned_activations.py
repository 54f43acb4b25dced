"""The planner's activations against what the CPU's allocator is asked for while the same micro-batches are trained on.

Both run the same code, one on shapes and one for real; what is compared is how bytes are counted, and whether the
highest moment of a pipeline's window is where the planner says. Not covered: CUDA's kernels and allocator.
"""

from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from backends.common.attention import allgather, packed_attention, ring
from backends.common.attention.kernels import CpuFlash
from backends.common.step.worst_batch import worst_packs
from backends.megatron.attention import context_layout_of
from backends.megatron.planning.estimate import estimate, planned_attention
from backends.megatron.planning.in_flight import WINDOWS_OF_STAGES
from slime_like.config import RunConfig
from slime_like.interfaces import RankPlacement
from tests.parallel.ranks import run_each
from tests.parallel.steps import running
from tests.parallel.tiny import tiny_config

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "full recompute": {"recompute": "full"},
    "selective recompute": {"recompute": "selective"},
    "tp2-sp": {"parallel": {"tensor": 2, "sequence": True}},
    "cp2": {"parallel": {"context": 2}},
    "cp2 all-gather": {"parallel": {"context": 2}, "attention": "allgather"},
    "pp2": {"parallel": {"pipeline": 2}},
}
NEAR = 0.1


def planned_config(model: Path, run_dir: Path, **trainer: Any) -> RunConfig:
    """Micro-batches of three sequences of 200 tokens, in the precision in which a CPU computes as a GPU does.

    By torch's operators, for which is planned: the kernels for a CPU keep less.
    """
    return tiny_config(
        model,
        run_dir,
        data={"max_prompt_tokens": 20},
        rollout={"max_new_tokens": 199},
        trainer={"target_tokens_per_batch": 600, **trainer},
    )


def allocated(run: Any) -> int:
    """Bytes that ``run`` has allocated at its highest moment, above what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    kineto: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in kineto.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def measure_rank(placement: RankPlacement, config: RunConfig) -> int:
    """The peak of a window of worst micro-batches, after a first one has made what stays."""
    pack = worst_packs(config, context_layout_of(planned_attention(config)))[-1]
    window = [pack] * (WINDOWS_OF_STAGES if config.trainer.parallel.pipeline > 1 else 1)
    with running(placement, config) as trainer:
        trainer.begin_step()
        trainer.accumulate(window)
        return allocated(lambda: trainer.accumulate(window))


@pytest.mark.parametrize("world_size", [1, 2])
def test_activations_are_those_of_a_real_window(
    world_size: int, qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (packed_attention, allgather, ring):
        monkeypatch.setattr(module, "kernel_for", lambda device: CpuFlash())
    configs = {name: planned_config(qwen3, tmp_path, **layout) for name, layout in LAYOUTS.items()}
    selected = {name: config for name, config in configs.items() if config.trainer.parallel.world_size == world_size}
    peaks = run_each(measure_rank, world_size, tmp_path / "ranks", [(config,) for config in selected.values()])
    for (name, config), found in zip(selected.items(), peaks, strict=True):
        for rank, real in enumerate(found):
            memory = estimate(config, rank).memory
            planned = memory.activation_bytes + memory.head_bytes
            assert planned == pytest.approx(real, rel=NEAR), f"{name}, rank {rank}: {planned} planned, {real} real"


def test_recomputation_keeps_less(qwen3: Path, tmp_path: Path) -> None:
    kept = [
        estimate(planned_config(qwen3, tmp_path, recompute=recompute), 0).memory.saved_bytes
        for recompute in ("none", "full")
    ]
    assert kept[1] < kept[0] / 4
