"""Settings of low-rank factors, and PEFT adapters that provide them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from backends.common.hugging_face.directory import write_adapter_settings
from slime_like.checks.check import check, require_valid
from slime_like.config import LoraConfig
from slime_like.config.reading.load import load_config, save_config
from slime_like.errors import ConfigError
from slime_like.weights.adapter import ADAPTER_FILE, factor_shapes
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


def _change(adapter: Path, **changes: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


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
    _change(adapter, use_rslora=True)
    assert load_config(None, [*flags, "--model.lora.path", str(adapter)]).model.lora.scale == 10 / math.sqrt(4)


@pytest.mark.parametrize(
    "changes",
    [
        {"peft_type": "LOHA"},
        {"use_dora": True},
        {"bias": "all"},
        {"rank_pattern": {"q_proj": 8}},
        {"alpha_pattern": {"q_proj": 8}},
        {"modules_to_save": ["lm_head"]},
        {"layers_to_transform": [0]},
        {"fan_in_fan_out": True},
        {"lora_bias": True},
        {"init_lora_weights": "pissa"},
        {"target_modules": ".*_proj"},
        {"a_later_setting": True},
    ],
)
def test_adapters_of_other_kinds_are_rejected(
    changes: dict[str, Any], flags: list[str], adapter: Path, rejects: Rejects
) -> None:
    _change(adapter, **changes)
    with rejects(ConfigError, "model.lora") as caught:
        require_valid(load_config(None, [*flags, "--model.lora.path", str(adapter)]))
    assert next(iter(changes)) in str(caught.value.problems[0])


@pytest.mark.parametrize("given", ["--model.lora.rank=8", "--model.lora.alpha=8", "--model.lora.targets=q_proj"])
def test_settings_must_be_the_adapters(given: str, flags: list[str], adapter: Path, rejects: Rejects) -> None:
    with rejects(ConfigError, "model.lora") as caught:
        require_valid(load_config(None, [*flags, "--model.lora.path", str(adapter), given]))
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    "flag", ["--model.lora.path=none-there", "--model.lora.alpha=8", "--model.lora.targets=q_proj"]
)
def test_settings_without_a_rank_are_rejected(flag: str, flags: list[str], rejects: Rejects) -> None:
    with rejects(ConfigError, "fields-conflict"):
        load_config(None, [*flags, flag])


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
