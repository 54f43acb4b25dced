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


@pytest.mark.parametrize("infix", ["", ".default"])
def test_names_with_and_without_the_adapters_name(infix: str, tmp_path: Path) -> None:
    values = {name: torch.rand(shape) for name, shape in SHAPES.items()}
    named = {name.replace(".weight", f"{infix}.weight"): each for name, each in values.items()}
    save_file(named, tmp_path / "adapter_model.safetensors")
    with Adapter(tmp_path, SHAPES) as adapter:
        assert torch.equal(adapter.read(A, 1, 1, 2), values[A][:, 1:])
        assert torch.equal(adapter.read(B, 0, 1, 2), values[B][1:3])


WRONG: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "missing": ({B: torch.empty(0)}, "tensors-do-not-fit"),
    "shape": ({A: torch.rand(3, 3)}, "tensors-do-not-fit"),
    "unexpected": ({"base_model.model.lm_head.lora_A.weight": torch.rand(2, 3)}, "tensors-do-not-fit"),
    "quantized": ({A: torch.ones(2, 3, dtype=torch.int8)}, "tensors-do-not-fit"),
    "not finite": ({A: torch.full((2, 3), torch.nan)}, "weights-not-finite"),
}


@pytest.mark.parametrize(("change", "code"), WRONG.values(), ids=WRONG)
def test_other_tensors_are_rejected(
    change: dict[str, torch.Tensor], code: str, tmp_path: Path, rejects: Rejects
) -> None:
    values = {A: torch.rand(2, 3), B: torch.rand(4, 2), **change}
    save_file({name: each for name, each in values.items() if each.numel()}, tmp_path / "adapter_model.safetensors")
    with rejects(CheckpointError, code), Adapter(tmp_path, SHAPES) as adapter:
        assert code == "weights-not-finite"
        adapter.read(A, 0, 0, 2)
