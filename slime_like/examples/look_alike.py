"""A small model like a given one: same family, features and tokenizer, random weights."""

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from slime_like.errors import ConfigError
from slime_like.examples.tiny_model import write_random_weights
from slime_like.models.dimensions import FAMILIES, ModelDimensions
from slime_like.models.tokenization import tokenizer_files
from slime_like.models.tower import transformers_config

_HEAD_DIM = 32
_HIDDEN = 128
_COMMON = 3.0
"""Norm of the part that all embeddings share, relative to their mean norm."""
_SHARE, _LARGEST_PART, _HALVINGS = 1 / 16, 64.0, 16
_VOCABULARY, _MULTIPLE = 2048, 512
"""The vocabulary size modulo ``_MULTIPLE`` is kept, so padding to a multiple is exercised."""
_LARGEST_GROUP = 3
"""Query heads per key head. Larger odd groups become 3, larger even ones 2."""


def make_look_alike(
    model: Path, directory: Path, layers: int = 2, with_vocabulary: bool = True, ends: Sequence[int] = ()
) -> None:
    """Write a float32 checkpoint like ``model``. Does not read the weights of ``model``.

    Keeps the family, biases, norms, tied or untied embeddings, rotary embeddings and their scaling, lengths, groups of
    query heads (up to three), and a dense layer in front of the layers with experts.

    Args:
        with_vocabulary: keep the vocabulary, the tokenizer's files and the EOS ids; otherwise use about 2,000 ids.
        ends: tokens of which the model samples one about every sixteen tokens, e.g. to end its turns.

    Raises ``ConfigError`` if the family of ``model`` is not supported.
    """
    dimensions = ModelDimensions.from_checkpoint(model)
    if (reason := dimensions.attention.unsupported) is not None:
        problem = f"model.path={model}: {reason}; use a model of a supported family to make a small one like it"
        raise ConfigError(problem, code="look-alike-family")
    config = transformers_config(model)
    small = FAMILIES[dimensions.family].small
    small = {name: value for name, value in small.items() if getattr(config, name, None) is not None}
    for name, value in _sizes(dimensions, small, layers, has_head_dim=hasattr(config, "head_dim")).items():
        if hasattr(config, name):
            setattr(config, name, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[-config.num_hidden_layers :]  # ends with attention, if any layer has it
    config.dtype = torch.float32
    if not with_vocabulary:
        config.vocab_size = min(config.vocab_size, _VOCABULARY + config.vocab_size % _MULTIPLE)
        config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 1, None
    has_generation = with_vocabulary and (model / "generation_config.json").is_file()
    generation = transformers.GenerationConfig.from_pretrained(model) if has_generation else None
    write_random_weights(
        config,
        directory,
        0,
        generation or transformers.GenerationConfig.from_model_config(config),
        lambda made: _sample_often(made, list(ends)) if ends else None,
    )
    for file in tokenizer_files(model) if with_vocabulary else ():
        copied = directory / file.relative_to(model)
        copied.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copied)


@torch.no_grad()
def _sample_often(model: Any, tokens: list[int]) -> None:
    """Add a common vector to all embeddings, and enough of it to these tokens' rows of the head to make them likely."""
    generator = torch.Generator().manual_seed(0)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    common = torch.randn(embedding.shape[1], generator=generator)
    common /= common.norm()
    embedding += _COMMON * embedding.norm(dim=1).mean() * common
    asked = torch.randint(0, embedding.shape[0], (4, 16), generator=generator)
    rows, low, high = head[tokens].clone(), 0.0, _LARGEST_PART
    for _ in range(_HALVINGS):
        part = (low + high) / 2
        head[tokens] = rows + part * common
        often = model(asked).logits.log_softmax(-1)[..., tokens].logsumexp(-1).mean() > math.log(_SHARE)
        low, high = (low, part) if often else (part, high)


def _sizes(dimensions: ModelDimensions, small: Mapping[str, Any], layers: int, has_head_dim: bool) -> dict[str, Any]:
    group = dimensions.num_heads // dimensions.num_kv_heads
    key_heads = min(2, dimensions.num_kv_heads)
    heads = small.get("num_attention_heads", key_heads * (group if group <= _LARGEST_GROUP else 3 if group % 2 else 2))
    hidden = _HIDDEN if has_head_dim and _HIDDEN % heads == 0 else heads * _HEAD_DIM
    dense = min(1, dimensions.dense_layers)
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers + dense,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": _HEAD_DIM,
        "max_window_layers": layers + dense,
    }
    if dimensions.num_experts:
        experts = min(8, dimensions.num_experts)
        groups = min(4, dimensions.moe_groups)
        top_groups = max(1, groups // 2)  # each gives two experts, as in DeepSeek-V3
        sizes |= dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), experts)
        sizes |= {
            "num_experts_per_tok": min(2 * top_groups, dimensions.moe_top_k),
            "moe_intermediate_size": hidden // 2,
        }
        sizes |= {"n_group": groups, "topk_group": top_groups, "first_k_dense_replace": dense}
        sizes |= {"num_nextn_predict_layers": 0, "decoder_sparse_step": 1}
    return sizes | dict(small)
