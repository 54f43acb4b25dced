"""Factors that an engine cannot apply by itself."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from backends.common.hugging_face.directory import write_adapter_settings
from slime_like.checks.check import check, require_valid
from slime_like.checks.definition import EVALUATION
from slime_like.config import LoraConfig, RunConfig
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.models.weight_files import header_shapes
from slime_like.orchestration.run.start_notes import settings_notes
from slime_like.weights.adapter import factor_shapes
from tests.parallel.towers import give_tower
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import sound_flags

ATTENTION = ("--model.lora.targets", "q_proj", "o_proj")
CASES = [
    ("qwen3", "vllm", ("--model.lora.rank", "513"), False),
    ("qwen3", "vllm", ("--model.lora.rank", "512"), True),
    ("qwen3", "sglang", ("--model.lora.rank", "513"), True),
    ("qwen3_moe", "vllm", (), False),
    ("qwen3_moe", "sglang", (), False),
    ("qwen3_moe", "transformers", (), False),
    ("qwen3_moe", "sglang", ("--model.lora.targets", "q_proj", "experts.down_proj"), False),
    ("qwen3_moe", "sglang", ATTENTION, True),
    ("qwen3_moe", "transformers", ATTENTION, True),
    ("deepseek_v3", "vllm", ("--model.lora.targets", "o_proj"), False),
    ("deepseek_v3", "sglang", ("--model.lora.targets", "o_proj"), False),
    ("deepseek_v3", "transformers", ("--model.lora.targets", "o_proj"), True),
    ("qwen3_vl", "vllm", (), False),
    ("qwen3_vl", "sglang", (), False),
    ("qwen3_vl", "transformers", (), True),
]


def given(root: Path, family: str, engine: str, flags: tuple[str, ...]) -> list[str]:
    make_tiny_model(root / "tiny", family.removesuffix("_vl"))
    if family.endswith("_vl"):
        give_tower(root / "tiny", family)
    own = ["--model.path", str(root / "tiny"), "--rollout.engine", engine, "--data.max_prompt_tokens", "64"]
    own += ["--rollout.max_new_tokens", "64", "--model.lora.rank", "4", "--model.lora.sync", "adapter"]
    return [*sound_flags(root), *own, *flags]


@pytest.mark.parametrize(("family", "engine", "flags", "sound"), CASES)
def test_factors_that_an_engine_applies(
    family: str, engine: str, flags: tuple[str, ...], sound: bool, tmp_path: Path, rejects: Rejects
) -> None:
    chosen = given(tmp_path, family, engine, flags)
    if not sound:
        with rejects(ConfigError, "rollout.adapter"):
            require_valid(load_config(None, chosen))
        chosen += ["--model.lora.sync", "merged"]
    assert check(load_config(None, chosen)) == []


def test_an_adapter_has_the_factors_of_the_model(tmp_path: Path, rejects: Rejects) -> None:
    model, other, adapter = tmp_path / "tiny", tmp_path / "other", tmp_path / "hf"
    make_tiny_model(model, "qwen3")
    make_tiny_model(other, "qwen3", num_hidden_layers=1)
    shutil.copytree(model, tmp_path / "copy")
    adapter.mkdir()
    lora = LoraConfig(rank=4)
    tensors = {name: np.ones(shape, np.float32) for name, shape in factor_shapes(lora, header_shapes(model)).items()}
    write_adapter_settings(adapter, lora, model, tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")

    def chosen(path: Path) -> RunConfig:
        sizes = ["--data.max_prompt_tokens", "64", "--rollout.max_new_tokens", "64"]
        flags = ["--model.path", str(path), "--model.lora.path", str(adapter), "--rollout.engine", "transformers"]
        return load_config(None, [*sound_flags(tmp_path), *sizes, *flags])

    for path, is_base in ((model, True), (tmp_path / "copy", False)):
        assert check(chosen(path)) == []
        assert any("as its base" in note for note in settings_notes(chosen(path))) != is_base
    with rejects(ConfigError, "model.adapter"):
        require_valid(chosen(other))
    (adapter / "adapter_model.safetensors").write_bytes(b"1234567")
    with rejects(ConfigError, "model.adapter"):
        require_valid(chosen(model))


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_experts_without_factors_are_named(family: str, tmp_path: Path, rejects: Rejects) -> None:
    chosen = [*given(tmp_path, family, "transformers", ()), "--model.lora.sync", "merged"]
    notes = list(settings_notes(load_config(None, chosen)))
    assert any("experts have no factors" in note for note in notes) == (family == "gpt_oss")
    with rejects(ConfigError, "model.lora"):
        require_valid(load_config(None, [*chosen, "--model.lora.targets", "experts.gate_up_proj"]))


def test_experts_have_the_same_kinds_of_factors_in_each_layer(tmp_path: Path, rejects: Rejects) -> None:
    up = ["layers.0.mlp.experts.up_proj"]
    chosen = [*given(tmp_path, "qwen3_moe", "transformers", ()), "--model.lora.sync", "merged", "--model.lora.targets"]
    assert check(load_config(None, [*chosen, *up, "layers.1.mlp.experts.up_proj"])) == []
    with rejects(ConfigError, "model.lora"):
        require_valid(load_config(None, [*chosen, *up, "layers.1.mlp.experts.gate_proj"]))


def test_an_adapter_is_no_model(tmp_path: Path, rejects: Rejects) -> None:
    adapter = tmp_path / "hf"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with rejects(ConfigError, "model.path"):
        require_valid(load_config(None, [*sound_flags(tmp_path), "--model.path", str(adapter)]))


def test_an_evaluation_needs_factors(tmp_path: Path, rejects: Rejects) -> None:
    flags = [*given(tmp_path, "qwen3", "vllm", ()), "--evaluation.files", str(tmp_path / "train.jsonl")]
    with rejects(ConfigError, "evaluation"):
        require_valid(load_config(None, flags), EVALUATION)
