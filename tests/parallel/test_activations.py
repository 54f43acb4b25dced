"""Offloaded activations leave gradients unchanged, bit for bit. Not covered: streams and pinned memory."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from backends.megatron import activations
from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.interfaces import RankPlacement
from slime_like.trajectory import PackedTrajectory
from tests.parallel.cases import parity_config
from tests.parallel.layouts import Settings
from tests.parallel.ranks import run_by_size
from tests.parallel.steps import exported_gradients, running, same_bits
from tests.parallel.tiny import scored_sequences


def _gradients(placement: RankPlacement, config: Any, pack: PackedTrajectory) -> tuple[dict[str, Tensor], int]:
    """Return one step's gradients and how many tensors were moved; the tiny model's tensors all may be."""
    moved = 0
    to_host = activations.ActivationOffload._to_host

    def counting(self: activations.ActivationOffload, tensor: Tensor) -> Any:
        nonlocal moved
        saved = to_host(self, tensor)
        if not isinstance(saved, Tensor):
            moved += 1
            assert not any(
                tensor.data_ptr() == weight.data_ptr() for chunk in self._modules for weight in chunk.parameters()
            )
        return saved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "SMALLEST_BYTES", 1)
        patch.setattr(activations.ActivationOffload, "_to_host", counting)
        with running(placement, config) as trainer:
            trainer.begin_step()
            trainer.accumulate([pack, pack], last=True)
            return exported_gradients(trainer, 3.0), moved


def test_offloaded_activations_give_the_same_gradients(qwen3: Path, tmp_path: Path) -> None:
    pack, tasks = pack_sequences(scored_sequences([(5, 9), (3, 1)])), {}
    layouts: list[Settings] = [{}, {"recompute": "full"}, {"pipeline": 2}]
    for number, layout in enumerate(layouts):
        for offload in (False, True):
            tasks[number, offload] = parity_config(qwen3, tmp_path, layout | {"activation_offload": offload}), pack
    found = run_by_size(_gradients, tmp_path, tasks)
    for number in range(len(layouts)):
        for (plain, none), (offloaded, moved) in zip(found[number, False], found[number, True], strict=True):
            assert none == 0 and moved > 10
            assert all(gradient.any() for gradient in plain.values())
            same_bits(offloaded, plain)
