"""Modules, objectives and classes that a role registers."""

from pathlib import Path

import pytest
import torch
from torch import nn

from backends.common.trainer import roles
from backends.fsdp.model import meta_model
from backends.fsdp.state import FsdpState
from backends.fsdp.weights import checkpoint_shapes
from slime_like.config import ModelConfig
from slime_like.examples.tiny_model import make_tiny_model


class Variant(FsdpState):
    """Another state."""


def add_head(settings: ModelConfig, model: nn.Module) -> None:
    model.added = nn.Linear(4, 1, dtype=getattr(torch, settings.dtype))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(roles.ADDERS, "fsdp", (f"{__name__}:add_head",))
    monkeypatch.setitem(roles.VARIANTS, "FsdpState", f"{__name__}:Variant")


def test_an_added_module_is_trained_but_in_no_hugging_face_checkpoint(tmp_path: Path, registered: None) -> None:
    make_tiny_model(tmp_path)
    settings = ModelConfig(path=tmp_path, dtype="bfloat16")
    model = meta_model(settings, torch.float32)
    own = model.own_by_name()
    assert model.parameters_by_name().keys() - own.keys() == {"added.weight", "added.bias"}
    assert checkpoint_shapes(model).keys() == own.keys()
    assert model.added.weight.dtype == torch.bfloat16


def test_a_variant_replaces_the_class_with_its_name(registered: None) -> None:
    assert roles.variant_of(FsdpState) is Variant
    assert roles.variant_of(dict) is dict
    assert roles.objective_of("logprob").__name__ == "Objective"
