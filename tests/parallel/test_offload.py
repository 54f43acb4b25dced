"""Offloaded state uses no device memory, and training continues as if it had never been offloaded.

On a CPU state moves within host memory; storages, views and autograd's accumulators are treated as on a GPU.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.common.trainer.base import TrainerBase
from backends.common.trainer.host_memory import HostOffload
from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.config import RunConfig
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import RankPlacement
from tests.parallel.ranks import run_each
from tests.parallel.steps import exported_from, running, same_bits, take_step
from tests.parallel.tiny import scored_sequences, tiny_config
from tests.support.locked import Locked


def _host_bytes(memory: HostOffload) -> int:
    """Return the host memory held, even while nothing is offloaded."""
    return sum(arena.nbytes for arena in memory._arenas)


CASES: dict[str, dict[str, Any]] = {
    "megatron-float32": {"dtype": "float32", "optimizer": {"distributed": False}},
    "megatron": {"optimizer": {"distributed": False}},
    "megatron-overlap": {"optimizer": {"distributed": False, "overlap": True}, "data": 2},
    "megatron-distributed": {"optimizer": {"distributed": True}, "data": 2},
    "megatron-factors": {"optimizer": {"distributed": True}, "data": 2, "lora": {"rank": 8}},
    "fsdp": {"backend": "fsdp", "data": 2},
}


def _config(model: Path, root: Path, case: dict[str, Any]) -> RunConfig:
    optimizer = {"lr": 1e-3, "warmup_steps": 2, **case.get("optimizer", {})}
    trainer = {"backend": case.get("backend", "megatron"), "optimizer": optimizer}
    trainer["activation_offload"] = case.get("activation_offload", False)
    layout, dtype = {"data": case.get("data", 1)}, case.get("dtype", "bfloat16")
    config = tiny_config(model, root, layout, dtype, trainer=trainer, steps=4)
    policy = {"path": model, "dtype": dtype, "lora": case.get("lora", {})}
    return RunConfig(**{**dict(config), "model": policy})


def _train(placement: RankPlacement, config: RunConfig, parks: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Return gradient norms of three steps and the weights; parks twice, in two stages, after the first step."""
    with running(placement, config) as trainer:
        norms = [_step(trainer)]
        if parks:
            _park_and_restore(trainer)
            _park_and_restore(trainer)
        norms += [_step(trainer) for _ in range(2)]
        return norms, exported_from(trainer)


def _step(trainer: Any) -> float:
    sequences = scored_sequences([(5, 9), (3, 4), (8, 21), (7, 3)])
    pack = pack_sequences(sequences[:2] if trainer.placement.rank == 0 else sequences[2:])
    stats = take_step(trainer, [pack], 4.0, last=True)
    return float(stats.grad_norm) if stats is not None else 0.0


def _park_and_restore(trainer: TrainerBase) -> None:
    state = trainer.state
    weights, parameters = state.weights(), [weight for weight in state.weights() if weight.requires_grad]
    nodes = [_accumulator(parameter) for parameter in parameters]
    kept = [weight.detach().clone() for weight in weights]
    trainer.settle_weights()
    state.offload_to_host(keep_weights=True)
    assert all(torch.equal(weight, copy) for weight, copy in zip(weights, kept, strict=True))
    state.offload_to_host(keep_weights=False)
    assert all(weight.untyped_storage().nbytes() == 0 for weight in weights)
    held = _host_bytes(state.offloaded)
    state.onload()
    assert all(torch.equal(weight, copy) for weight, copy in zip(weights, kept, strict=True))
    assert all(_accumulator(parameter) is node for parameter, node in zip(parameters, nodes, strict=True))
    # Main weights and moments; only moments if weights are float32.
    trained = parameters if trainer.config.model.lora.is_set else weights
    assert held >= sum(weight.nbytes for weight in weights) + sum(weight.nbytes for weight in trained)


def _accumulator(parameter: Tensor) -> Any:
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


@pytest.mark.parametrize("name", CASES)
def test_training_continues_as_if_never_parked(name: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", "qwen3", num_hidden_layers=2)
    config = _config(tmp_path / "model", tmp_path, CASES[name])
    size = config.trainer.parallel.world_size
    plain, offloaded = run_each(_train, size, tmp_path / "ranks", [(config, False), (config, True)])
    for (norms, weights), (expected_norms, expected) in zip(offloaded, plain, strict=True):
        assert norms == expected_norms
        same_bits(weights, expected)


def _locked_memory(placement: RankPlacement, config: RunConfig, directory: Path) -> tuple[int, Locked]:
    """Return how many ranges CUDA would lock before shutdown, and the table after it, with the trainer still alive."""
    with pytest.MonkeyPatch.context() as patch, running(placement, config) as trainer:
        patch.setattr("backends.megatron.activations.SMALLEST_BYTES", 1)
        locked = Locked()
        locked.use(patch)
        _step(trainer)
        trainer.state.add_frozen("reference")
        trainer.start_save(directory).finish()
        trainer.state.offload_to_host(keep_weights=False)
        held = len(locked.ranges)
    assert _host_bytes(trainer.state.offloaded) == 0
    return held, locked


@pytest.mark.parametrize(("backend", "ranges"), [("megatron", 5), ("fsdp", 4)])
def test_shutdown_unlocks_host_memory(backend: str, ranges: int, qwen3: Path, tmp_path: Path) -> None:
    config = _config(qwen3, tmp_path, {"backend": backend, "activation_offload": backend == "megatron"})
    tasks = [(config, tmp_path / f"save{number}") for number in range(2)]
    (results,) = zip(*run_each(_locked_memory, 1, tmp_path / "ranks", tasks), strict=True)
    for held, locked in results:
        assert held == ranges and locked.ranges == {} and locked.late == []


def test_host_memory_is_reused_and_grows_as_needed() -> None:
    memory, first = HostOffload(), torch.arange(1000.0)
    view, second = first[10:20], torch.ones(3000)
    for _ in range(3):
        memory.offload([first, view])
        memory.restore()
    assert _host_bytes(memory) == 4096
    memory.discard([second])
    memory.offload([first])
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 0
    memory.offload([first, torch.full((2000,), 7.0)])
    assert _host_bytes(memory) == 4096 + 8192
    memory.restore()
    assert torch.equal(first, torch.arange(1000.0)) and torch.equal(view, first[10:20])
    assert torch.equal(second, torch.zeros(3000))
