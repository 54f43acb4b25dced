"""Any Hugging Face causal language model trains completely with FSDP, or is rejected with a reason.

Families without formulas in this project are compared like the known ones (``test_fsdp_parity``): with the model's
float64 forward pass on unpacked sequences, its gradients and its updates.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from backends.fsdp.model import _require_nothing_else
from backends.fsdp.trainer import FsdpTrainer
from slime_like.config import RunConfig
from slime_like.errors import ConfigError, TrainerError
from slime_like.interfaces import RankPlacement
from slime_like.models.dimensions import ModelDimensions
from slime_like.planning.plan import count_parameters
from tests.parallel.parity import PACKS, make_case
from tests.parallel.ranks import run_each
from tests.parallel.test_fsdp_parity import check_case, run_cases
from tests.parallel.tiny import OTHERS, SIZES, save_checkpoint, tiny_config
from tests.parallel.values import as_critic, value_config

REFUSED = {
    "Gemma2Config": "asks for softcap in attention",
    "MixtralConfig": "checkpoints of MixtralForCausalLM are arranged differently from its modules",
    "FalconConfig": "no causal language model for it whose attention can be replaced",
    "Lfm2Config": "a sequence affects the next one in a micro-batch",
    "Qwen2MoeConfig": "differ from those of transformers' own forward pass",  # a window in its mask only
    "a factor that its head leaves out": "differ from those of transformers' own forward pass",
    "a sequence longer than a chunk": f"a sequence has {max(map(sum, PACKS[1]))} tokens, but layers of",
}
"""Configuration class of transformers, or a fault of a checkpoint, and the message."""


def test_other_families_of_transformers_compute_the_reference(tmp_path: Path) -> None:
    cases = [make_case(family, tmp_path / family, steps=1) for family in OTHERS]
    for case in cases:
        case.expected.balance = 0.0  # not requested: the choices of other families' routers are unknown
    for family, case, results in zip(OTHERS, cases, run_cases(cases, {"context": 2}, tmp_path, steps=1), strict=True):
        try:
            check_case(case, results)
        except AssertionError as error:
            pytest.fail(f"{family}: {error}")


def test_models_that_do_not_support_packs_are_rejected_by_name(tmp_path: Path) -> None:
    """Runs in bfloat16, whose rounding could hide a difference."""
    models = [_checkpoint(name, tmp_path / str(index)) for index, name in enumerate(REFUSED)]
    wide = make_case("llama", tmp_path / "case", steps=0).packs()[1]
    configs = [_config(model, name) for name, model in zip(REFUSED, models, strict=True)]
    messages = run_each(_refusal, 1, tmp_path / "ranks", [(config, wide) for config in configs])
    for (name, sentence), (message,) in zip(REFUSED.items(), messages, strict=True):
        assert sentence in message, f"{name}: {message}"


def test_critics_of_other_families_start_unless_they_do_not_support_packs(tmp_path: Path) -> None:
    """The check at the start gives the head weights for a moment; it begins at 0, without a bias of the logits."""
    kinds = [save_checkpoint(family, tmp_path / family) for family in ("gemma3_text", "phi", "cohere", "qwen3_5_text")]
    models = [*kinds, _checkpoint("Lfm2Config", tmp_path / "lfm2")]
    tasks = [(value_config(model, tmp_path, {"backend": "fsdp"}, "bfloat16"),) for model in models]
    *found, (refused,) = run_each(_start_of_a_critic, 1, tmp_path / "ranks", tasks)
    assert found == [("started with 0.0",)] * len(kinds)
    assert "a sequence affects the next one in a micro-batch (values change by" in refused


def _start_of_a_critic(placement: RankPlacement, config: RunConfig) -> str:
    trainer = FsdpTrainer(config, as_critic(placement))
    try:
        trainer.setup()
        return f"started with {float(trainer.model.hugging_face.score.weight.full_tensor().detach().abs().max())}"
    except ConfigError as error:
        return str(error)
    finally:
        trainer.shutdown()


def test_a_buffer_of_the_checkpoint_is_rejected_by_name() -> None:
    """Buffers that follow from the configuration are in no checkpoint, and routers' biases are kept."""
    module = torch.nn.Linear(2, 2)
    module.register_buffer("angles", torch.zeros(2), persistent=False)
    module.register_buffer("e_score_correction_bias", torch.zeros(2))
    model = torch.nn.ModuleDict({"gate": module})
    _require_nothing_else(model)
    module.register_buffer("running_mean", torch.zeros(2))
    with pytest.raises(ConfigError, match=r"has 1 tensor \(gate\.running_mean, "):
        _require_nothing_else(model)


def test_a_plan_counts_the_model_itself(tmp_path: Path) -> None:
    """A token passes two of four experts and everything else except the embedding."""
    model = save_checkpoint("qwen2_moe", tmp_path)
    found = ModelDimensions.from_checkpoint(model)
    counted = count_parameters(_config(model, ""), found, FsdpTrainer)
    sizes = {name: value.numel() for name, value in load_file(model / "model.safetensors").items()}
    assert found.attention.unsupported is not None and counted.num_parameters == sum(sizes.values())
    idle = sum(size for name, size in sizes.items() if ".experts.0." in name or ".experts.1." in name)
    assert counted.active_parameters == sum(sizes.values()) - idle - sizes["model.embed_tokens.weight"]


def _refusal(placement: RankPlacement, config: RunConfig, pack: Any) -> str:
    """Return the error of the run's start, or of its first pack."""
    trainer = FsdpTrainer(config, placement)
    try:
        trainer.setup()
        trainer.score([pack])
    except (ConfigError, TrainerError) as error:
        return str(error)
    finally:
        trainer.shutdown()
    return "nothing"


def _config(model: Path, name: str) -> RunConfig:
    supervised = {"loss": "sft"} if "chunk" in name else {}  # lengths of samples are rejected before anything starts
    lengths: dict[str, Any] = {"data": {"max_prompt_tokens": 16}, "rollout": {"max_new_tokens": 16}}
    return tiny_config(model, model, None, "bfloat16", **lengths, algorithm=supervised, trainer={"backend": "fsdp"})


def _checkpoint(name: str, directory: Path) -> Path:
    if not name.endswith("Config"):
        save_checkpoint("llama", directory)
        change = {
            "attention_chunk_size": 32,
            "mlp_bias": False,
            "hidden_act": "silu",
            "architectures": ["Llama4ForCausalLM"],
        }
        file = directory / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps(config | (change if "chunk" in name else {"logits_scaling": 4.0})))
        return directory
    torch.manual_seed(0)
    sizes = {**SIZES, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, name)(**sizes, **_FEATURES.get(name, {}))
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


_FEATURES: dict[str, dict[str, Any]] = {
    "Gemma2Config": {"head_dim": 16},
    "MixtralConfig": {"num_local_experts": 2},
    "Qwen2MoeConfig": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32,
        "use_sliding_window": True,
        "sliding_window": 200,
        "layer_types": ["sliding_attention"] * 4,
    },
    "Lfm2Config": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_multiple_of": 32},
}
