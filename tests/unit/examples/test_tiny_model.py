"""The tiny checkpoint, read by transformers, and its data."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from slime_like.errors import ConfigError
from slime_like.examples.tiny_model import make_arithmetic_data, make_tiny_model
from slime_like.models.dimensions import ModelDimensions
from tests.conftest import Tiny
from tests.support.rejections import Rejects

SCALING = {"rope_type": "linear", "factor": 8.0}
_HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", *_HYBRID])
def test_families(family: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, family)
    dimensions = ModelDimensions.from_checkpoint(tmp_path)
    assert dimensions.family == family
    assert (dimensions.hidden_size, dimensions.num_layers, dimensions.head_dim) == (128, 3, 32)
    assert dimensions.qkv_bias == (family == "qwen2") and dimensions.tied_embeddings == (family == "qwen2")
    assert (dimensions.rope_scaling is not None) == (family == "llama")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
    logits = model(torch.arange(12)[None]).logits
    assert logits.shape == (1, 12, dimensions.vocab_size) and logits.isfinite().all()
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert tensor.unique().numel() > tensor.numel() // 2, name  # so a conversion that loses a norm is detected


@pytest.mark.parametrize("family", _HYBRID)
def test_sizes_of_linear_attention(family: str, tmp_path: Path, rejects: Rejects) -> None:
    make_tiny_model(tmp_path, family)
    dimensions = ModelDimensions.from_checkpoint(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert dimensions.num_parameters == sum(tensor.numel() for tensor in stored.values())
    assert dimensions.attention.linear is not None
    assert [f"model.layers.{layer}.linear_attn.A_log" in stored for layer in range(3)] == [True, False, True]
    assert dimensions.attention.linear.layers == (0, 2) and dimensions.attention_layers == 1
    assert (dimensions.rotary_dim, dimensions.attention.output_gate, dimensions.zero_centered_norms) == (8, True, True)
    assert dimensions.moe_shared_gate == ("model.layers.0.mlp.shared_expert_gate.weight" in stored)
    norms = (float(stored[f"model.{name}.weight"].mean()) for name in ("norm", "layers.0.linear_attn.norm"))
    assert [round(mean) for mean in norms] == [0, 1]
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    # Published ones describe their layers by an interval, and have a fraction beside, not inside, rope_scaling.
    published = {name: value for name, value in config.items() if name not in ("layer_types", "rope_parameters")}
    file.write_text(json.dumps({**published, "full_attention_interval": 3, "partial_rotary_factor": 0.5}))
    read = ModelDimensions.from_checkpoint(tmp_path)
    assert read.attention.linear is not None and read.attention.linear.layers == (0, 1) and read.rotary_dim == 16
    for change in ({"partial_rotary_factor": 2.0}, {"linear_num_key_heads": 3}):
        file.write_text(json.dumps({**config, "rope_parameters": None, **change}))
        with rejects(ConfigError, "config"):
            ModelDimensions.from_checkpoint(tmp_path)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text"])
def test_windows_and_biases(family: str, tmp_path: Path, rejects: Rejects) -> None:
    make_tiny_model(tmp_path, family, num_hidden_layers=4)
    dimensions, stored = ModelDimensions.from_checkpoint(tmp_path), load_file(tmp_path / "model.safetensors")
    assert dimensions.num_parameters == sum(tensor.numel() for tensor in stored.values())
    assert dimensions.attention.windows == (8, None, 8, None)
    has_sinks = family == "gpt_oss"
    assert (dimensions.attention.sinks, dimensions.attention.output_bias, dimensions.moe_bias) == (has_sinks,) * 3
    assert dimensions.post_norms == dimensions.tied_embeddings == dimensions.zero_centered_norms == (not has_sinks)
    assert dimensions.rope_theta == (150_000.0 if has_sinks else 1_000_000.0)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    # Published ones name no kinds of layers, and Gemma's first sizes had a scaling whose factor their context includes.
    older = {name: value for name, value in config.items() if name not in ("layer_types", "tie_word_embeddings")}
    older |= {} if has_sinks else {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": SCALING}
    file.write_text(json.dumps(older))
    read = ModelDimensions.from_checkpoint(tmp_path)
    assert read.attention == dimensions.attention and read.max_position_embeddings == 1024
    assert read.tied_embeddings == dimensions.tied_embeddings
    assert has_sinks or (read.rope_theta, read.rope_scaling) == (5e5, SCALING)
    wrong: dict[str, Any] = {"quantization_config": {"quant_method": "mxfp4"}} if has_sinks else {"sliding_window": 0}
    file.write_text(json.dumps(config | wrong))
    with rejects(ConfigError, "config"):
        ModelDimensions.from_checkpoint(tmp_path)


@pytest.mark.parametrize("change", [{"swiglu_limit": 6.0}, {"attn_logit_softcapping": 50.0}], ids=str)
def test_other_activations_and_scores_have_no_formulas(change: dict[str, float], tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "gpt_oss" if "swiglu_limit" in change else "gemma3_text")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    reason = ModelDimensions.from_checkpoint(tmp_path).attention.unsupported
    assert reason is not None and f"{next(iter(change))}={next(iter(change.values()))}" in reason


def test_seed_and_overrides(tmp_path: Path, rejects: Rejects) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_tiny_model(tmp_path / name, "qwen3", seed, num_hidden_layers=1, tie_word_embeddings=True, dtype="bfloat16")
    files = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert files["a"] == files["b"] != files["c"]
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    assert "lm_head.weight" not in tensors and "model.layers.1.mlp.up_proj.weight" not in tensors
    assert tensors["model.norm.weight"].dtype == torch.bfloat16
    with rejects(ConfigError, "config"):
        make_tiny_model(tmp_path / "d", "qwen3", hiden_size=4)
    with rejects(ConfigError, "config"):
        make_tiny_model(tmp_path / "d", "gpt2")
    assert not (tmp_path / "d").exists()


def test_tokenizer(tiny: Tiny) -> None:
    tokenizer, dimensions = AutoTokenizer.from_pretrained(tiny.model), ModelDimensions.from_checkpoint(tiny.model)
    assert len(tokenizer) == dimensions.vocab_size
    for text in ("12+34=46", "naïve ∑\n\t 🙂"):
        ids = tokenizer(text).input_ids
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text
    turn: list[dict[str, Any]] = [{"role": "user", "content": "1+2="}]
    rendered = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    assert rendered == "<user>1+2=<assistant>"
    assert len(tokenizer(rendered, add_special_tokens=False).input_ids) == 6
    answered = tokenizer.apply_chat_template([*turn, {"role": "assistant", "content": "3"}], tokenize=False)
    assert answered == rendered + "3<eos>"
    eos = GenerationConfig.from_pretrained(tiny.model).eos_token_id
    assert eos == tokenizer.eos_token_id == dimensions.eos_token_ids[0]
    assert tokenizer.pad_token_id not in (None, eos)


def test_arithmetic_data(tmp_path: Path) -> None:
    make_arithmetic_data(tmp_path, seed=3)
    files = [tmp_path / f"{name}.jsonl" for name in ("train", "eval", "sft")]
    train, held_out, sft = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    assert (len(train), len(held_out)) == (2200, 300)
    for row in train + held_out:
        a, b = row["prompt"].removesuffix("=").split("+")
        assert int(a) < 50 and int(b) < 50
        assert row["answer"] == row["response"] == str(int(a) + int(b))
    prompts = {row["prompt"] for row in train}
    assert len(prompts) == 2200 and len({row["prompt"] for row in held_out}) == 300
    assert not prompts & {row["prompt"] for row in held_out}
    assert {row["prompt"] for row in sft} == prompts and len(sft) == 4 * 2200
    errors = [int(row["response"]) - int(row["answer"]) for row in sft]
    assert set(errors) == {0, 1} and 0.62 < sum(errors) / len(errors) < 0.68
