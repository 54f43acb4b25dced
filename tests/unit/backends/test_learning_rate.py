"""Optimizers: rates and weight decays like Megatron's, counters, and ranges of state."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from backends.fsdp.optimizer import learning_rate, weight_decay
from backends.megatron import checkpoint
from backends.megatron.optimizer import _fuse, boxes
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


@pytest.mark.parametrize("device", ["cpu", "meta"])  # meta represents a GPU
def test_the_counter_of_a_loaded_optimizer_is_where_the_fused_update_reads_it(device: str) -> None:
    parameters = [torch.nn.Parameter(torch.ones(3, device=device)), torch.nn.Parameter(torch.ones(2, device=device))]
    adamw = torch.optim.AdamW(parameters)
    _fuse(adamw)
    optimizer: Any = SimpleNamespace(parts=[SimpleNamespace(optimizer=adamw)])
    for fill in (checkpoint._fill_adam_state, lambda each: checkpoint._set_adam_step(each, 7)):
        fill(optimizer)
        steps = [adamw.state[parameter]["step"] for parameter in parameters]
        assert [(step.device.type, step.dtype) for step in steps] == [(device, torch.float32)] * 2
        assert steps[0] is not steps[1]  # each is incremented
    if device == "cpu":
        assert checkpoint._adam_step(optimizer) == 7


@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
def test_boxes_have_the_elements_of_the_range_in_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    elements = np.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, elements.size))
    stop = data.draw(st.integers(start, elements.size))
    covered = [
        elements[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        for offsets, sizes in boxes(start, stop, shape)
    ]
    assert [element for box in covered for element in box.ravel()] == list(range(start, stop))
    assert len(covered) <= 2 * len(shape) - 1
