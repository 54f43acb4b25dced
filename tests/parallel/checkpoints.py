"""Runs that are saved and continued: a rank's steps, records and errors."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.config import RunConfig
from slime_like.errors import CheckpointError, TrainerError
from slime_like.interfaces import RankPlacement
from slime_like.models.dimensions import ModelDimensions
from tests.parallel.layouts import layout_of
from tests.parallel.steps import Trainer, exported_from, held_writes, packs_of_rank, running, take_step
from tests.parallel.tiny import scored_sequences, tiny_config


@dataclass
class RankRecord:
    """One rank's weights at the checkpoint and after another step, and numbers drawn right after the checkpoint."""

    at_checkpoint: dict[str, Tensor]
    later: dict[str, Tensor]
    drawn: Tensor


@dataclass
class Saved:
    """A run that was saved and then continued. Its directory has ``trainer`` and, of some runs, ``behind``."""

    config: RunConfig
    root: Path
    records: list[RankRecord]


def merged_records(records: list[RankRecord], what: str) -> dict[str, Tensor]:
    return {name: tensor for record in records for name, tensor in getattr(record, what).items()}


def checkpoint_config(model: Path, run_dir: Path, layout: str, dtype: str = "float32", **more: Any) -> RunConfig:
    """Return the configuration of a run with a schedule, moving biases if its routers have some, and low-rank factors
    if ``lora`` has settings."""
    settings = layout_of(layout)
    backend = settings.pop("backend", "megatron")
    optimizer: dict[str, Any] = {"lr": 1e-3, "warmup_steps": 3, "decay": "cosine", "weight_decay": 0.1}
    lora, dense = more.pop("lora", None), not ModelDimensions.from_checkpoint(model).moe_sigmoid
    if lora is not None:
        optimizer = {"lr": 1e-2}
    optimizer["distributed"] = settings.pop("distributed", backend == "fsdp")
    rate = 0.0 if dense or lora else 0.01 if backend == "megatron" else 0.005
    trainer = {"backend": backend, "optimizer": optimizer, "router_bias_rate": rate}
    config = tiny_config(model, run_dir, settings, dtype, trainer=trainer, **{"steps": 20, **more})
    if lora is None:
        return config
    policy = {"path": model, "dtype": dtype, "lora": lora}
    return RunConfig.model_validate({**config.model_dump(), "model": policy})


def two_seeded_steps(trainer: Trainer, placement: RankPlacement) -> None:
    torch.manual_seed(100 + placement.rank)
    for _ in range(2):
        step_of_four(trainer)


def step_of_four(trainer: Trainer) -> None:
    """Train on four sequences in two packs, divided between the replicas."""
    sequences = scored_sequences([(5, 9), (3, 4), (8, 21), (7, 3)])
    packs = [pack_sequences(sequences[:2]), pack_sequences(sequences[2:])]
    take_step(trainer, packs_of_rank(trainer.coordinates, packs)[1], 4.0)


def record_of(trainer: Trainer) -> RankRecord:
    drawn, at_checkpoint = torch.rand(4), exported_from(trainer)
    step_of_four(trainer)
    return RankRecord(at_checkpoint, exported_from(trainer), drawn)


def save_and_continue(placement: RankPlacement, config: RunConfig, root: Path, behind: bool = False) -> RankRecord:
    """Save and export; if ``behind``, save again, and write nothing before another step has changed all state."""
    with running(placement, config) as trainer:
        two_seeded_steps(trainer, placement)
        trainer.save(root / "trainer")
        if config.model.lora.is_set or config.trainer.backend == "fsdp":
            trainer.export_hf(root / "hf")
        if not behind:
            return record_of(trainer)
        with held_writes() as gate:
            save = trainer.start_save(root / "behind")
            record = record_of(trainer)
            assert not save.is_written()
            with pytest.raises(TrainerError) as caught:  # its copies would be overwritten
                trainer.start_save(root / "next")
            assert caught.value.code == "save-under-way" and not (root / "next").exists()
            assert not list((root / "behind").glob("*.distcp")) and not (root / "behind" / "checksums.json").exists()
            dist.barrier()
            gate.set()
            save.finish()
        return record


def load_and_continue(placement: RankPlacement, config: RunConfig, directory: Path) -> RankRecord:
    """Load into a trainer that has already trained, whose state must not survive."""
    with running(placement, config) as trainer:
        step_of_four(trainer)
        trainer.load(directory)
        return record_of(trainer)


def errors_of(placement: RankPlacement, config: RunConfig, directories: list[Path]) -> list[str]:
    """Return the errors of loading each of the directories."""
    with running(placement, config) as trainer:
        return [error_of(trainer.load, directory) for directory in directories]


def error_of(action: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        action(*arguments)
    return str(caught.value)
