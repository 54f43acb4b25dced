"""The FSDP trainer's learning rates and weight decays equal those of Megatron's scheduler."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from backends.fsdp.optimizer import learning_rate, weight_decay
from slime_like.config import RunConfig


def _config(optimizer: dict[str, Any], minibatches: int = 1) -> RunConfig:
    algorithm, trainer = {"minibatches": minibatches}, {"optimizer": optimizer}
    return RunConfig(run_dir=Path("runs"), steps=5, model={"path": "m"}, algorithm=algorithm, trainer=trainer)


def _scheduler(groups: list[dict[str, Any]], **settings: Any) -> OptimizerParamScheduler:
    constant = {"init_lr": 0.0, "lr_decay_style": "constant", "start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 1}
    return OptimizerParamScheduler(SimpleNamespace(param_groups=groups), **constant | settings)


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_rates_equal_megatrons(decay: str, warmup: int) -> None:
    config = _config({"lr": 3e-4, "min_lr": 1e-5, "warmup_steps": warmup, "decay": decay}, minibatches=2)
    group, updates = {"lr": 0.0}, config.total_updates
    rates = {"max_lr": 3e-4, "min_lr": 1e-5, "lr_warmup_steps": warmup, "lr_decay_steps": updates}
    scheduler = _scheduler([group], **rates, lr_decay_style=decay, wd_incr_style="constant")
    for update in range(1, updates + 3):
        scheduler.step(1)
        assert learning_rate(config.trainer.optimizer, config.total_updates, update) == pytest.approx(
            group["lr"], rel=1e-12
        ), update


@pytest.mark.parametrize("final", [None, 0.05, 0.4])
def test_weight_decay_equals_megatrons(final: float | None) -> None:
    config = _config({"weight_decay": 0.05, "final_weight_decay": final})
    matrix, norm = ({"lr": 0.0, "wd_mult": multiplier} for multiplier in (1.0, 0.0))
    rates = {"max_lr": 1.0, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 5}
    decays = {"start_wd": 0.05, "end_wd": final or 0.05, "wd_incr_steps": 5, "wd_incr_style": "linear"}
    scheduler = _scheduler([matrix, norm], **rates, **decays)
    for update in range(1, 8):
        scheduler.step(1)
        assert weight_decay(config.trainer.optimizer, config.total_updates, update) == pytest.approx(
            matrix["weight_decay"], rel=1e-12
        ), update
        assert norm["weight_decay"] == 0.0
    assert weight_decay(config.trainer.optimizer, config.total_updates, 5) == pytest.approx(final or 0.05)
