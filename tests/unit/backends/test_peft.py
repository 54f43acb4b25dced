"""Low-rank factors: PEFT computes with them what merged weights compute, and what PEFT saves is read back."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from backends.common.hugging_face.directory import write_adapter_settings
from backends.common.hugging_face.files import Adapter
from backends.common.trainer.lora import Initial, Trial, initial_a
from backends.fsdp.model import meta_model
from backends.fsdp.weights import checkpoint_shapes, piece_shapes
from slime_like.config import LoraConfig, ModelConfig
from slime_like.errors import CheckpointError, ConfigError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.models.families import FAMILIES
from slime_like.models.tower import has_tower
from slime_like.models.weight_files import header_shapes, model_shapes
from slime_like.weights.adapter import ADAPTER_FILE, factor_names, factor_shapes, module_ends, with_tower
from slime_like.weights.expected_tensors import expected_factors
from tests.parallel.tiny import save_checkpoint
from tests.parallel.towers import KINDS, save_tower
from tests.support.rejections import Rejects

RANK, ALPHA = 2, 5.0
IDS = torch.arange(20, 44)[None]
ALL = ("all-linear",)
STACKED, PLAIN, TOWER = "qwen3_5_moe_text", "deepseek_v3", "qwen3_5_moe"
"""Families with experts in stacks, with experts, a shared one and a dense layer, and with a tower and stacks."""
CASES = [
    *((family, ALL) for family in FAMILIES),
    *((kind, ALL) for kind in ("gemma3", "glm4v_moe", TOWER)),
    *((family, ("o_proj", "shared_experts.down_proj", "mlp.gate_proj")) for family in (PLAIN, "glm4_moe", "glm4v_moe")),
    *((family, targets) for family in (PLAIN, STACKED, TOWER) for targets in [("up_proj",), ("experts.down_proj",)]),
    *((family, ("layers.1.mlp.experts.up_proj", "layers.1.mlp.experts.gate_proj")) for family in (PLAIN, STACKED)),
]


class Exported:
    """A tiny model with an adapter of random factors, written as exports are."""

    def __init__(self, root: Path, family: str, targets: tuple[str, ...]) -> None:
        self.model, self.adapter = root / "model", root / "adapter"
        if family in KINDS:
            save_tower(family, self.model)
        else:
            make_tiny_model(self.model, family, num_hidden_layers=2)
        self.lora = LoraConfig(rank=RANK, alpha=ALPHA, targets=targets, dropout=0.1)
        generator = torch.Generator().manual_seed(0)
        shapes = factor_shapes(self.lora, model_shapes(self.model))
        self.factors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        stored = {with_tower(name) if has_tower(self.model) else name: one for name, one in self.factors.items()}
        self.adapter.mkdir()
        save_file(stored, self.adapter / ADAPTER_FILE, {"format": "pt"})
        write_adapter_settings(self.adapter, self.lora, self.model, stored)

    def read(self, adapter: Path) -> dict[str, Tensor]:
        """Return the factors like a run that continues from ``adapter``."""
        expected = expected_factors(ModelConfig(path=self.model, lora=LoraConfig(path=adapter)))
        with Adapter(adapter, expected) as opened:
            return {name: opened.read_whole(name).clone() for name in expected}

    def transformers(self) -> Any:
        auto = AutoModelForImageTextToText if has_tower(self.model) else AutoModelForCausalLM
        return auto.from_pretrained(self.model, dtype=torch.float64, experts_implementation="eager").eval()

    @torch.no_grad()
    def merge(self, model: Any) -> None:
        """Add the products to transformers' parameters."""
        for name, parameter in model.named_parameters():
            experts, _, stack = name.rpartition(".")
            if experts.endswith(".experts") and parameter.ndim == 3:
                kinds = ("gate_proj", "up_proj") if stack == "gate_up_proj" else (stack,)
                for number, matrix in enumerate(parameter):
                    for kind, part in zip(kinds, matrix.chunk(len(kinds)), strict=True):
                        part += self._product(f"{experts}.{number}.{kind}.weight", part)
            else:
                parameter += self._product(name, parameter)

    def _product(self, weight: str, like: Tensor) -> Tensor:
        a, b = factor_names(weight)
        if a not in self.factors:
            return torch.zeros_like(like)
        return ALPHA / RANK * self.factors[b].double() @ self.factors[a].double()


def logprobs(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=IDS).logits
    return logits.log_softmax(-1)


@torch.no_grad()
@pytest.mark.parametrize(("family", "targets"), CASES)
def test_peft_computes_merged_weights(family: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    exported = Exported(tmp_path, family, targets)
    assert {"gate", "router", "shared_expert_gate"}.isdisjoint(module_ends(exported.factors))
    merged = exported.transformers()
    base = logprobs(merged)
    exported.merge(merged)
    right = logprobs(merged)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(exported.transformers(), exported.adapter, autocast_adapter_dtype=False)
    found = logprobs(model.double().eval())
    assert float((right - base).abs().max()) > 0.01
    torch.testing.assert_close(found, right, rtol=0, atol=1e-9)
    assert not [note for note in noted if "adapter keys" in str(note.message)]
    check_factors(exported, exported.adapter)


def check_factors(exported: Exported, adapter: Path) -> None:
    """PEFT joins gate and up projections of experts, so one is there with the other."""
    read = exported.read(adapter)
    assert exported.factors.keys() <= read.keys()
    for name, factor in read.items():
        assert torch.equal(factor.float(), exported.factors.get(name, torch.zeros_like(factor)).float()), name


def test_what_peft_saves_is_read_back(tmp_path: Path, rejects: Rejects) -> None:
    """Unless gate and up projections of experts share inner rows, as they do after training there."""
    exported = Exported(tmp_path, STACKED, ALL)
    model = PeftModel.from_pretrained(exported.transformers(), exported.adapter, is_trainable=True)
    model.save_pretrained(str(tmp_path / "same"))
    check_factors(exported, tmp_path / "same")
    for name, parameter in model.named_parameters():
        if "experts.base_layer.lora_B" in name:
            parameter.data += 1.0
    model.save_pretrained(str(tmp_path / "trained"))
    with rejects(CheckpointError, "factors-shared"):
        exported.read(tmp_path / "trained")


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


LM_A, LM_B = "base_model.model.lm.q_proj.lora_A.weight", "base_model.model.lm.q_proj.lora_B.weight"
LM_SHAPES = {LM_A: (4, 64), LM_B: (32, 4)}


def test_a_trial_starts_like_training_but_with_a_product() -> None:
    start, trial = Initial(LM_SHAPES), Trial(LM_SHAPES)
    assert torch.equal(start.read(LM_A, 0, 0, 4), initial_a(LM_A, (4, 64)))
    assert torch.equal(trial.read(LM_A, 1, 16, 8), start.read(LM_A, 0, 0, 4)[:, 16:24])
    assert not start.read(LM_B, 0, 0, 32).any()
    whole = trial.read(LM_B, 0, 0, 32)
    assert whole.all() and 0.04 < float(whole.abs().max()) <= 0.05
    assert torch.equal(trial.read(LM_B, 0, 8, 4), whole[8:12])


def _model(path: Path, **lora: object) -> ModelConfig:
    return ModelConfig(path=path, dtype="bfloat16", lora=LoraConfig(**{"rank": 2, **lora}))  # type: ignore[arg-type]


def test_factors_are_float32_and_the_frozen_base_is_not(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen3_moe", num_hidden_layers=2)
    settings = _model(tmp_path, targets="up_proj,o_proj")
    model = meta_model(settings, torch.float32)
    trained = model.stored_by_name()
    assert piece_shapes(model, trained) == factor_shapes(settings.lora, header_shapes(tmp_path))
    assert checkpoint_shapes(model) == header_shapes(tmp_path)
    assert {each.dtype for each in trained.values()} == {torch.float32}
    others = [each for name, each in model.parameters_by_name().items() if name not in trained]
    assert {(each.dtype, each.requires_grad) for each in others} == {(torch.bfloat16, False)}


def test_targets_that_are_not_linear_layers_are_rejected(tmp_path: Path, rejects: Rejects) -> None:
    path = save_checkpoint("gpt2", tmp_path)
    with rejects(ConfigError, "config") as caught:
        meta_model(_model(path), torch.float32)
    assert "transformer.h.0.attn.c_attn.weight is a matrix of a Conv1D" in str(caught.value)
    with rejects(ConfigError, "config") as caught:
        meta_model(_model(path, targets="q_proj"), torch.float32)
    assert "targets=['q_proj']: no matrix of the model" in str(caught.value)
