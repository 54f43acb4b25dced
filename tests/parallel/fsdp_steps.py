"""Work of one rank of the FSDP trainer in the parity tests, like ``steps.train_rank`` but with whole tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from backends.fsdp.trainer import FsdpTrainer
from slime_like.algorithms.packing.pack import real_tokens, zero_weight_pack
from slime_like.config import RunConfig
from slime_like.interfaces import RankPlacement
from slime_like.trajectory import PackedTrajectory
from tests.parallel.parity import ALGORITHM, OPTIMIZER, STEPS, Case
from tests.parallel.steps import RankResult, exported_gradients, optimizer_steps

Settings = dict[str, Any]
"""Sizes of ``trainer.parallel``, and settings of ``trainer`` and ``trainer.optimizer``."""


def fsdp_config(case: Case, run_dir: Path, layout: Settings, dtype: str = "float32", **algorithm: Any) -> RunConfig:
    """Return the parity case's configuration for this backend."""
    sizes = {name: layout[name] for name in ("data", "context") if name in layout}
    of_trainer = {name: layout[name] for name in ("recompute", "attention", "fsdp", "share_prefixes") if name in layout}
    of_optimizer = {name: layout[name] for name in ("offload", "clip_grad") if name in layout}
    return RunConfig(
        run_dir=run_dir,
        steps=STEPS,
        model={"path": case.checkpoint, "dtype": dtype},
        data={"max_prompt_tokens": 31},
        rollout={"max_new_tokens": 31},
        algorithm={**ALGORITHM, **case.algorithm, **algorithm},
        trainer={
            "backend": "fsdp",
            "parallel": sizes,
            "optimizer": {**OPTIMIZER, **of_optimizer},
            "head_chunk_tokens": 8,
            "step_timeout_s": 60.0,
            "cpu_threads": 1,
            **of_trainer,
        },
    )


def train_fsdp_rank(
    placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory], denominator: float, steps: int
) -> RankResult:
    """Return everything that the parity tests compare, from one rank. Gradients and weights are whole."""
    trainer = FsdpTrainer(config, placement)
    coordinates = trainer.setup()
    indices = list(range(coordinates.data, len(packs), coordinates.data_size))
    mine = [packs[index] for index in indices]
    window = -(-len(packs) // coordinates.data_size)
    filled = mine + [zero_weight_pack(packs[0])] * (window - len(mine))
    scored = trainer.score(filled)
    assert scored is not None
    _two_windows(trainer, filled, denominator)
    exported = exported_gradients(trainer, denominator)
    gradients = _whole(trainer, lambda parameter: parameter.grad)
    stats = optimizer_steps(trainer, steps, denominator, lambda: _two_windows(trainer, filled, denominator))
    weights = _whole(trainer, lambda parameter: parameter)
    result = RankResult(coordinates, indices, scored[: len(mine)], gradients, stats, weights, exported)
    trainer.shutdown()
    return result


def _two_windows(trainer: FsdpTrainer, packs: list[PackedTrajectory], denominator: float) -> None:
    """Take a step in two windows, as with streaming, and score between them. Neither may affect the result."""
    trainer.begin_step(denominator, real_tokens(packs))
    trainer.accumulate(packs[:1], last=len(packs) == 1)
    trainer.score(packs[1:], "reference")
    if packs[1:]:
        trainer.accumulate(packs[1:], last=True)


def _whole(trainer: FsdpTrainer, part: Callable[[nn.Parameter], Any]) -> dict[str, Tensor]:
    """Return whole tensors by Hugging Face's module name, on every rank."""
    trainer.model.shard_weights()
    parameters = trainer.model.hugging_face.named_parameters()
    return {name: part(parameter).full_tensor().detach().float().clone() for name, parameter in parameters}
