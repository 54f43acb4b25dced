"""Settings of low-rank factors, adapters that provide them, and engines that cannot apply them."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from backends.common.hugging_face.directory import write_adapter_settings
from slime_like.checks import EVALUATION
from slime_like.checks.check import check, require_valid
from slime_like.config import LoraConfig, RunConfig
from slime_like.config.reading.load import load_config, save_config
from slime_like.errors import ConfigError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.models.weight_files import header_shapes
from slime_like.orchestration.run.opening import settings_notes
from slime_like.weights.adapter import ADAPTER_FILE, factor_shapes
from tests.parallel.towers import give_tower
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import sound_flags

TARGETS = ["q_proj", "v_proj"]
MATRICES = [f"model.layers.{layer}.self_attn.{name}.weight" for layer in range(12) for name in TARGETS]
WRITTEN: dict[str, Any] = {
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "auto_mapping", "base_model_name_or_path")),
    **dict.fromkeys(("corda_config", "eva_config", "exclude_modules", "kasa_config", "layer_replication")),
    **dict.fromkeys(("layers_pattern", "layers_to_transform", "lora_ga_config", "megatron_config", "modules_to_save")),
    **dict.fromkeys(("monteclora_config", "revision", "target_parameters", "trainable_token_indices", "use_bdlora")),
    **dict.fromkeys(("ensure_weight_tying", "fan_in_fan_out", "inference_mode", "lora_bias", "use_dora"), False),
    **dict.fromkeys(("use_qalora", "use_rslora"), False),
    **{"alpha_pattern": {}, "rank_pattern": {}, "loftq_config": {}, "bias": "none", "init_lora_weights": True},
    **{"lora_alpha": 10, "lora_dropout": 0.0, "megatron_core": "megatron.core", "peft_type": "LORA", "r": 4},
    **{"peft_version": "0.21.2", "qalora_group_size": 16, "target_modules": TARGETS, "task_type": "CAUSAL_LM"},
}
"""What PEFT 0.21.2 writes."""


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(WRITTEN))
    shapes = factor_shapes(LoraConfig(rank=4), dict.fromkeys(MATRICES, (2, 2)))
    save_file({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, directory / ADAPTER_FILE)
    return directory


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Flags of a run on a model with two matrices in its layers."""
    flags = sound_flags(tmp_path)
    weights = {name: np.ones((2, 2), np.float32) for name in [*MATRICES, "lm_head.weight"]}
    save_file(weights, tmp_path / "model" / "model.safetensors")
    return flags


def test_an_adapter_determines_rank_alpha_and_targets(flags: list[str], adapter: Path, tmp_path: Path) -> None:
    """The written configuration names them, so it can be read without the adapter."""
    config = load_config(None, [*flags, "--model.lora.path", str(adapter), "--model.lora.dropout", "0.5"])
    lora = config.model.lora
    assert (lora.rank, lora.alpha, lora.scale, lora.targets, lora.dropout) == (4, 10.0, 2.5, ("q_proj", "v_proj"), 0.5)
    assert check(config) == []
    save_config(config, tmp_path / "config.yaml")
    (adapter / "adapter_config.json").unlink()
    assert load_config(tmp_path / "config.yaml").model.lora == lora


def test_the_scale_of_a_rank_stabilized_adapter(flags: list[str], adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text(json.dumps(WRITTEN | {"use_rslora": True}))
    assert load_config(None, [*flags, "--model.lora.path", str(adapter)]).model.lora.scale == 10 / math.sqrt(4)


OTHER_KINDS: list[dict[str, Any]] = [
    {"peft_type": "LOHA"}, {"use_dora": True}, {"bias": "all"}, {"rank_pattern": {"q_proj": 8}},
    {"alpha_pattern": {"q_proj": 8}}, {"modules_to_save": ["lm_head"]}, {"layers_to_transform": [0]},
    {"fan_in_fan_out": True}, {"lora_bias": True}, {"init_lora_weights": "pissa"}, {"target_modules": ".*_proj"},
    {"a_later_setting": True},
]  # fmt: skip


def test_adapters_of_other_kinds_and_other_settings_are_rejected(
    flags: list[str], adapter: Path, rejects: Rejects
) -> None:
    flags += ["--model.lora.path", str(adapter)]
    for given in ("rank=8", "alpha=8", "targets=q_proj"):
        with rejects(ConfigError, "model.lora") as caught:
            require_valid(load_config(None, [*flags, f"--model.lora.{given}"]))
        assert len(caught.value.problems) == 1
    for changes in OTHER_KINDS:
        (adapter / "adapter_config.json").write_text(json.dumps(WRITTEN | changes))
        with rejects(ConfigError, "model.lora") as caught:
            require_valid(load_config(None, flags))
        assert next(iter(changes)) in str(caught.value.problems[0])


def test_targets_must_be_matrices_of_the_layers(flags: list[str], rejects: Rejects) -> None:
    rank = [*flags, "--model.lora.rank", "4", "--model.lora.targets"]
    assert check(load_config(None, [*rank, "q_proj", "v_proj"])) == []
    assert check(load_config(None, [*rank, "all-linear"])) == []
    with rejects(ConfigError, "model.lora") as caught:
        require_valid(load_config(None, [*rank, "q_proj", "v_prj", "lm_head"]))
    near, other = map(str, caught.value.problems)
    assert "v_prj; use v_proj" in near and "lm_head; use q_proj or v_proj" in other


def test_roles_start_as_the_initial_policy_or_its_base(flags: list[str], adapter: Path, rejects: Rejects) -> None:
    flags += ["--model.lora.path", str(adapter), "--algorithm.kl.coef", "0.1", "--algorithm.advantage", "gae"]
    flags += ["--reference.placement", "workers"]
    as_base = ["--reference.path", "base", "--critic.path", "base"]
    initial, base = load_config(None, flags), load_config(None, [*flags, *as_base])
    for config, lora in ((initial, initial.model.lora), (base, LoraConfig())):
        (role,) = config.roles.with_workers
        worker, critic = config.for_worker(role).model, config.for_critic().model
        assert worker.path == critic.path == config.model.path and config.has_same_base(role)
        assert worker.lora == lora
        assert critic.lora.path == lora.path and not critic.lora.is_set, "it is merged, and all weights are trained"
    load_config(None, [*flags, "--reference.update_interval", "2"])
    with rejects(ConfigError, "fields-conflict"):  # the workers have no factors to update
        load_config(None, [*flags, *as_base, "--reference.update_interval", "2"])


@pytest.mark.parametrize("targets", [["all-linear"], TARGETS])
def test_written_settings_are_read_back(targets: list[str], flags: list[str], tmp_path: Path) -> None:
    lora = load_config(None, [*flags, "--model.lora.rank", "4", "--model.lora.targets", *targets]).model.lora
    factors = [f"base_model.model.model.layers.0.self_attn.{name}.lora_A.weight" for name in TARGETS]
    write_adapter_settings(tmp_path, lora, Path("base"), factors)
    read = load_config(None, [*flags, "--model.lora.path", str(tmp_path)]).model.lora
    assert (read.rank, read.alpha, read.targets) == (4, 32.0, ("q_proj", "v_proj"))


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


def test_an_adapter_is_no_model_and_an_evaluation_needs_one(tmp_path: Path, rejects: Rejects) -> None:
    adapter = tmp_path / "hf"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with rejects(ConfigError, "model.path"):
        require_valid(load_config(None, [*sound_flags(tmp_path), "--model.path", str(adapter)]))
    flags = [*given(tmp_path, "qwen3", "vllm", ()), "--evaluation.files", str(tmp_path / "train.jsonl")]
    with rejects(ConfigError, "evaluation"):
        require_valid(load_config(None, flags), EVALUATION)
