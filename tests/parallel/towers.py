"""Make tiny checkpoints with a vision tower, under the names of every published form, and compute with whole models."""

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tests.parallel.tiny import _HYBRID, _HYBRID_EXPERTS, _KNOWN, SIZES

NEW = ("model.language_model.", "lm_head.", "model.")
"""Prefixes of the decoder, of its head, and of everything else."""
PLAIN = ("model.", "lm_head.", "")
INNER = ("language_model.model.", "language_model.lm_head.", "")

_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
_SIGLIP = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "patch_size": 4,
}
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
KINDS: dict[str, tuple[str, tuple[str, str, str], dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        PLAIN,
        {"num_attention_heads": 2, "rope_parameters": _MROPE},
        {**_QWEN_VISION, "out_hidden_size": 64, "fullatt_block_indexes": [0]},
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        NEW,
        {"head_dim": 32, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        {**_QWEN_VISION, "out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "gemma3": (  # tied embeddings, and windows
        "Gemma3Config",
        INNER,
        {
            "head_dim": 32,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 24,
        },
        {**_SIGLIP, "image_size": 16},
    ),
    "mistral3": (
        "Mistral3Config",
        INNER,
        {"model_type": "mistral", "sliding_window": None},
        {**_SIGLIP, "head_dim": 16},
    ),
    "glm4v_moe": (
        "Glm4vMoeConfig",
        NEW,
        {
            **_KNOWN["glm4_moe"][1],
            "use_qk_norm": False,
            "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]},
        },
        {**_QWEN_VISION, "out_hidden_size": 64, "image_size": 16},
    ),
    "qwen3_5_moe": (  # experts in stacks
        "Qwen3_5MoeConfig",
        NEW,
        {
            **_HYBRID,
            **_HYBRID_EXPERTS,
            "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
        },
        {**_QWEN_VISION, "out_hidden_size": 64, "num_position_embeddings": 16},
    ),
}
"""Configuration class, form of the names, and differences of the language model and of the tower, by model type."""


def save_tower(kind: str, directory: Path, layers: int = 2, seed: int = 0) -> Path:
    """Write a float32 checkpoint with random weights and a tower whose type is bfloat16; return its directory."""
    torch.manual_seed(seed)
    class_name, form, text, vision = KINDS[kind]
    tied = {"tie_word_embeddings": kind == "gemma3"}
    sizes = {**SIZES, "num_hidden_layers": layers, **tied, **_IDS, **text}
    config = getattr(transformers, class_name)(text_config=sizes, vision_config=vision, **tied)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
    directory.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    state = {name: tensor for name, tensor in model.state_dict().items() if kind != "gemma3" or "lm_head" not in name}
    if kind == "glm4v_moe":
        state = revert_weight_conversion(model, state)  # which separates experts
    tensors = {_stored(name, form): tensor.contiguous() for name, tensor in state.items()}
    if kind == "qwen3_5_moe":
        tensors["mtp.fc.weight"] = torch.randn(64, 128)
    save_file(
        {name: tensor if is_language(name) else tensor.bfloat16() for name, tensor in tensors.items()},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    if form is PLAIN:  # as its publisher has it, without a part for the language model
        file = directory / "config.json"
        written = json.loads(file.read_text())
        flat = written.pop("text_config") | {"model_type": kind}
        rope = flat.pop("rope_parameters")
        flat |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
        file.write_text(json.dumps(flat | written))
    return directory


def give_tower(directory: Path, kind: str) -> None:
    """Put a tower of one tensor beside a one-file language model. No trainer computes with it."""
    file, weights = directory / "config.json", directory / "model.safetensors"
    text = json.loads(file.read_text())
    whole = {
        "model_type": kind,
        "architectures": [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]],
        "vision_config": {},
    }
    file.write_text(json.dumps({**whole, "text_config": text, "dtype": text["dtype"]}))
    tensors = {name.replace("model.", "model.language_model."): each for name, each in load_file(weights).items()}
    save_file({**tensors, "model.visual.merger.weight": torch.randn(3, 5)}, weights, {"format": "pt"})


def _stored(name: str, form: tuple[str, str, str]) -> str:
    """Return the published name of a parameter of transformers' whole model."""
    decoder, head, rest = form
    if name.startswith("model.language_model."):
        return decoder + name.removeprefix("model.language_model.")
    return head + name.removeprefix("lm_head.") if name.startswith("lm_head.") else rest + name.removeprefix("model.")


def own_name(whole: str) -> str:
    """Return the language model's own name of a parameter of transformers' whole model."""
    return whole.replace("model.language_model.", "model.")


def is_language(name: str) -> bool:
    return re.search(r"visual|vision_tower|multi_modal_projector|^mtp", name) is None


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {name: each for file in directory.glob("*.safetensors") for name, each in load_file(file).items()}


def tower_of(directory: Path) -> dict[str, Tensor]:
    return {name: each for name, each in tensors_of(directory).items() if not is_language(name)}
