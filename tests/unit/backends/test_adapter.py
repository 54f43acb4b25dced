"""Reading of a PEFT adapter's tensors."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from backends.common.hugging_face.files import Adapter
from slime_like.errors import CheckpointError
from tests.support.rejections import Rejects

A, B = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{letter}.weight" for letter in "AB")
SHAPES = {A: (2, 3), B: (4, 2)}


def _write(directory: Path, **tensors: torch.Tensor) -> Path:
    values = {A: torch.rand(2, 3), B: torch.rand(4, 2), **tensors}
    save_file({name: each for name, each in values.items() if each.numel()}, directory / "adapter_model.safetensors")
    return directory


@pytest.mark.parametrize("infix", ["", ".default"])
def test_names_with_and_without_the_adapters_name(infix: str, tmp_path: Path) -> None:
    values = {name: torch.rand(shape) for name, shape in SHAPES.items()}
    named = {name.replace(".weight", f"{infix}.weight"): each for name, each in values.items()}
    save_file(named, tmp_path / "adapter_model.safetensors")
    with Adapter(tmp_path, SHAPES) as adapter:
        assert torch.equal(adapter.read(A, 1, 1, 2), values[A][:, 1:])
        assert torch.equal(adapter.read(B, 0, 1, 2), values[B][1:3])


@pytest.mark.parametrize(
    "change",
    [
        {B: torch.empty(0)},
        {A: torch.rand(3, 3)},
        {"base_model.model.lm_head.lora_A.weight": torch.rand(2, 3)},
        {A: torch.ones(2, 3, dtype=torch.int8)},
    ],
    ids=["missing", "shape", "unexpected", "quantized"],
)
def test_other_tensors_are_rejected(change: dict[str, torch.Tensor], tmp_path: Path, rejects: Rejects) -> None:
    with rejects(CheckpointError, "tensors-do-not-fit") as caught:
        Adapter(_write(tmp_path, **change), SHAPES)
    assert "adapter_config.json" in str(caught.value)


def test_values_must_be_finite(tmp_path: Path, rejects: Rejects) -> None:
    adapter = Adapter(_write(tmp_path, **{A: torch.full((2, 3), torch.nan)}), SHAPES)
    with adapter, rejects(CheckpointError, "weights-not-finite"):
        adapter.read(A, 0, 0, 2)
