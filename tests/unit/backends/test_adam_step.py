"""Megatron's AdamW where Transformer Engine is missing: one fused pass, and a counter beside each parameter."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.megatron import checkpoint
from backends.megatron.optimizer import _fuse


@pytest.mark.parametrize("device", ["cpu", "meta"])  # shapes stand for a GPU
def test_the_counter_of_a_loaded_optimizer_lies_where_the_fused_update_reads_it(device: str) -> None:
    parameters = [torch.nn.Parameter(torch.ones(3, device=device)), torch.nn.Parameter(torch.ones(2, device=device))]
    adamw = torch.optim.AdamW(parameters)
    _fuse(adamw)
    optimizer: Any = SimpleNamespace(parts=[SimpleNamespace(optimizer=adamw)])
    for fill in (checkpoint._fill_adam_state, lambda each: checkpoint._set_adam_step(each, 7)):
        fill(optimizer)
        steps = [adamw.state[parameter]["step"] for parameter in parameters]
        assert [(step.device.type, step.dtype) for step in steps] == [(device, torch.float32)] * 2
        assert steps[0] is not steps[1]  # each is counted up
    if device == "cpu":
        assert checkpoint._adam_step(optimizer) == 7


def test_the_update_is_one_fused_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    plain, fused = (torch.optim.AdamW([parameter], lr=0.1) for _ in range(2))
    _fuse(fused)
    taken: list[str] = []
    for name in ("_fused_adam", "_multi_tensor_adam", "_single_tensor_adam"):
        monkeypatch.setattr(
            importlib.import_module("torch.optim.adam"), name, lambda *args, name=name, **options: taken.append(name)
        )
    parameter.grad = torch.ones(3)
    plain.step()
    fused.step()
    assert taken == ["_single_tensor_adam", "_fused_adam"]
