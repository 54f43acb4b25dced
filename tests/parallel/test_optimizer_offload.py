"""Optimizer state in host memory: the same update, the same checkpoints, and both kinds load each other's.

On a CPU, device and host memory are the same: what is tested is the arithmetic and the bookkeeping of Megatron's
host optimizer, not its copies between devices.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from torch import Tensor

from backends.megatron.trainer import MegatronTrainer
from slime_like.config import RunConfig
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import RankPlacement
from tests.parallel.ranks import held_ports, run_ranks
from tests.parallel.steps import assert_close, exported_from, running
from tests.parallel.test_checkpoint import step_of_four
from tests.parallel.tiny import tiny_config

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "tp2-sp-dp2": {"tensor": 2, "sequence": True, "data": 2},
    "ep2": {"data": 2, "expert": 2},
}


def _config(root: Path, layout: str, dtype: str, offload: bool, distributed: bool = True) -> RunConfig:
    model = root / f"model-{layout}"
    if not model.exists():
        make_tiny_model(model, "qwen3_moe" if layout == "ep2" else "qwen3", num_hidden_layers=2)
    optimizer = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5}
    optimizer |= {"offload": offload, "distributed": distributed, "overlap": layout != "single"}
    return tiny_config(model, root, LAYOUTS[layout], dtype, trainer={"optimizer": optimizer}, steps=20)


@dataclass(frozen=True)
class Run:
    """Of ``config``, at its port: three steps, saved after two; or the third. Unless ``fresh``, one is lost before."""

    config: RunConfig
    port: int
    save: Path | None = None
    load: Path | None = None
    fresh: bool = False


def _train(placement: RankPlacement, runs: list[Run]) -> list[list[dict[str, Tensor]]]:
    """Weights and optimizer state after every step of every run."""
    return [_one_run(replace(placement, master_port=run.port), run) for run in runs]


def _one_run(placement: RankPlacement, run: Run) -> list[dict[str, Tensor]]:
    with running(placement, run.config) as trainer:
        _require_kind(trainer)
        if run.load is not None:
            if not run.fresh:
                step_of_four(trainer)
            trainer.load(run.load)
        weights = []
        for step in range(3) if run.save is not None else [2]:
            if run.save is not None and step == 2:
                trainer.save(run.save)
            step_of_four(trainer)
            weights.append(_main_weights(trainer))
        return weights


def _require_kind(trainer: MegatronTrainer) -> None:
    hybrid = [isinstance(part.optimizer, HybridDeviceOptimizer) for part in trainer.optimizer.parts]
    assert hybrid == [trainer.config.trainer.optimizer.offload] * len(hybrid)


def _main_weights(trainer: MegatronTrainer) -> dict[str, Tensor]:
    """This rank's shards in float32, as the optimizer keeps them, and the model's own weights."""
    found = {f"model.{name}": tensor.float() for name, tensor in exported_from(trainer).items()}
    for index, part in enumerate(trainer.optimizer.parts):
        for model_param, (group, order) in part.model_param_group_index_map.items():
            tensors = part._get_main_param_and_optimizer_states(model_param)
            for name in ("param", "exp_avg", "exp_avg_sq"):
                assert tensors[name].dtype == torch.float32
                found[f"{name}.{index}.{group}.{order}"] = tensors[name].detach().clone()
    return found


def _assert_close(found: Any, expected: Any, bound: float) -> None:
    for our_step, their_step in zip(found, expected, strict=True):
        assert_close(our_step, their_step, bound)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_update_and_its_checkpoints_are_those_of_the_device(layout: str, tmp_path: Path) -> None:
    """Three AdamW steps; the last one also by both kinds from each kind's checkpoint."""
    bound = 1e-7
    device, host = (_config(tmp_path, layout, "bfloat16", offload) for offload in (False, True))
    by_device, by_host = tmp_path / "by-device", tmp_path / "by-host"
    with held_ports(5) as ports:
        runs = [
            Run(device, ports[0], save=by_device),
            Run(host, ports[1], save=by_host),
            Run(host, ports[2], load=by_device, fresh=True),
            Run(host, ports[3], load=by_host),
            Run(device, ports[4], load=by_host),
        ]
        ranks = run_ranks(_train, device.trainer.parallel.world_size, tmp_path / "ranks", runs)
    for on_device, on_host, *others in ranks:
        _assert_close(on_host, on_device, bound)
        for other in others:
            _assert_close(other, on_device[-1:], bound)
    first, *_, last = ranks[0][1]
    mains = [name for name in first if name.startswith("param.")]
    assert min(float((last[name] - first[name]).abs().max()) for name in mains) > 100 * bound


def test_what_megatrons_host_optimizer_cannot_do_is_refused(tmp_path: Path) -> None:
    whole, precision = MegatronTrainer.check(_config(tmp_path, "single", "float32", True, distributed=False))
    assert whole.startswith("trainer.optimizer.offload needs trainer.optimizer.distributed")
    assert precision.startswith("trainer.optimizer.offload: Megatron's host optimizer takes no float32 weights")
