"""Megatron's AdamW without Transformer Engine has a step counter on each parameter's device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.megatron import checkpoint
from backends.megatron.optimizer import _fuse


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
