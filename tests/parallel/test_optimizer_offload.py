"""An optimizer in host memory makes the same updates and checkpoints, and both kinds load each other's checkpoints.

Device and host memory are the same on a CPU: the tests cover the arithmetic and bookkeeping of Megatron's host
optimizer, not its copies between devices.
"""

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
from tests.parallel.checkpoints import step_of_four
from tests.parallel.ranks import run_each
from tests.parallel.steps import assert_close, exported_from, running
from tests.parallel.tiny import tiny_config
from tests.support.acceptance import some_in_acceptance

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


def _train(
    placement: RankPlacement, config: RunConfig, save: Path | None, load: Path | None, fresh: bool = False
) -> list[dict[str, Tensor]]:
    """Return weights and optimizer state after each of three steps, saved after two; or load and do only the third.

    Unless ``fresh``, a step is done before ``load`` and must leave no trace.
    """
    with running(placement, config) as trainer:
        _require_kind(trainer)
        if load is not None:
            if not fresh:
                step_of_four(trainer)
            trainer.load(load)
        weights = []
        for step in range(3) if save is not None else [2]:
            if save is not None and step == 2:
                trainer.save(save)
            step_of_four(trainer)
            weights.append(_main_weights(trainer))
        return weights


def _require_kind(trainer: MegatronTrainer) -> None:
    hybrid = [isinstance(part.optimizer, HybridDeviceOptimizer) for part in trainer.optimizer.parts]
    assert hybrid == [trainer.config.trainer.optimizer.offload] * len(hybrid)
    # Both are one fused pass, which torch's AdamW, the replacement of Transformer Engine's, is not by default.
    assert all(group["fused"] for part in trainer.optimizer.parts for group in part.optimizer.param_groups)


def _main_weights(trainer: MegatronTrainer) -> dict[str, Tensor]:
    """Return the optimizer's float32 shards on this rank, and the model's own weights."""
    found = {f"model.{name}": tensor.float() for name, tensor in exported_from(trainer).items()}
    for index, part in enumerate(trainer.optimizer.parts):
        for model_param, (group, order) in part.model_param_group_index_map.items():
            tensors = part._get_main_param_and_optimizer_states(model_param)
            for name in ("param", "exp_avg", "exp_avg_sq"):
                assert tensors[name].dtype == torch.float32
                found[f"{name}.{index}.{group}.{order}"] = tensors[name].detach().clone()
    return found


def _assert_close(found: Any, expected: Any, bound: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for our_step, their_step in zip(ours, theirs, strict=True):
            assert_close(our_step, their_step, bound)


@pytest.mark.parametrize("layout", some_in_acceptance(LAYOUTS, lambda layout: layout == "tp2-sp-dp2"))
def test_updates_and_checkpoints_are_the_same(layout: str, tmp_path: Path) -> None:
    """Does three AdamW steps, the last one also from each kind's checkpoint by both kinds."""
    bound = 1e-7
    device, host = (_config(tmp_path, layout, "bfloat16", offload) for offload in (False, True))
    by_device, by_host = tmp_path / "by-device", tmp_path / "by-host"
    tasks = [
        (device, by_device, None),
        (host, by_host, None),
        (host, None, by_device, True),
        (host, None, by_host),
        (device, None, by_host),
    ]
    on_device, on_host, *others = run_each(_train, device.trainer.parallel.world_size, tmp_path / "ranks", tasks)
    _assert_close(on_host, on_device, bound)
    for other in others:
        _assert_close(other, [steps[-1:] for steps in on_device], bound)
    first, *_, last = on_host[0]
    mains = [name for name in first if name.startswith("param.")]
    assert min(float((last[name] - first[name]).abs().max()) for name in mains) > 100 * bound
