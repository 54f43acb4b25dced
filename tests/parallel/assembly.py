"""Assembly of all ranks' shards to Hugging Face tensors, written independently of the product's conversion."""

import re
from typing import Any

import torch
from torch import Tensor

from slime_like.models.dimensions import ModelDimensions
from slime_like.models.families.deepseek_v3 import LatentAttention

Shards = dict[tuple[int, int], dict[str, Tensor]]
"""Local tensors by (pipeline, tensor) rank and Megatron name with global layer and expert numbers.

Experts are listed under every tensor rank of their stage, independent of their expert-parallel rank.
"""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"local_experts\.(\d+)\.")
_GROUPED = re.compile(r"experts\.(linear_fc[12])\.weight(\d+)")
_STACKED = {
    "mlp.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.linear_fc1.bias": "mlp.experts.gate_up_proj_bias",
    "mlp.experts.linear_fc2.weight": "mlp.experts.down_proj",
    "mlp.experts.linear_fc2.bias": "mlp.experts.down_proj_bias",
}
"""Stacks of a rank's experts in gpt-oss. Every expert is a separate shard, numbered after an ``@``."""

_REPLICATED = {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.norm_weight": "linear_attn.norm.weight",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}
_LATENT_REPLICATED = {
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
}
_POST_NORMS = {
    "self_attention.post_layernorm.weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "pre_feedforward_layernorm.weight",
    "mlp.post_layernorm.weight": "post_feedforward_layernorm.weight",
}
_LATENT_ROWS = {
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
}


def local_shard(trainer: Any, gradients: bool) -> dict[str, Tensor]:
    """Return this rank's parameters or finished gradients, with global layer and expert numbers."""
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    first_expert = trainer.coordinates.expert * (
        trainer.dimensions.num_experts // trainer.config.trainer.parallel.expert
    )
    shard = {}
    for chunk in trainer.chunks:
        offset = get_transformer_layer_offset(chunk.config, vp_stage=chunk.vp_stage)
        for name, parameter in chunk.named_parameters():
            match, values = _LAYER.fullmatch(name), parameter.main_grad if gradients else parameter.detach()
            if match and match[2] in _STACKED:
                layer = f"decoder.layers.{int(match[1]) + offset}"
                shard |= {f"{layer}.{match[2]}@{first_expert + n}": part.clone() for n, part in enumerate(values)}
                continue
            if match:
                rest = _GROUPED.sub(r"experts.local_experts.\2.\1.weight", match[2])
                rest = _EXPERT.sub(lambda m: f"local_experts.{int(m[1]) + first_expert}.", rest)
                name = f"decoder.layers.{int(match[1]) + offset}.{rest}"
            shard[name] = values.clone()
    return shard


def to_hugging_face(shards: Shards, dimensions: ModelDimensions) -> dict[str, Tensor]:
    """Return full tensors by Hugging Face name."""
    full: dict[str, Tensor] = {}
    tensor_size = 1 + max(tensor for _, tensor in shards)
    for stage in sorted({stage for stage, _ in shards}):
        parts = [shards[stage, tensor] for tensor in range(tensor_size)]
        for name in parts[0]:
            for key, value in _converted(name, [part[name] for part in parts], dimensions).items():
                if key in full:  # a tied embedding is on the first and the last stage
                    torch.testing.assert_close(value, full[key], rtol=0, atol=1e-7, msg=f"{key} differs between stages")
                full[key] = value
    return stacked_experts(_stacked(full, dimensions))


def _stacked(tensors: dict[str, Tensor], dimensions: ModelDimensions) -> dict[str, Tensor]:
    numbers = range(dimensions.num_experts)
    stacks = {name.partition("@")[0] for name in tensors if "@" in name}
    plain = {name: tensor for name, tensor in tensors.items() if "@" not in name}
    return plain | {name: torch.stack([tensors[f"{name}@{number}"] for number in numbers]) for name in stacks}


def _converted(name: str, parts: list[Tensor], dimensions: ModelDimensions) -> dict[str, Tensor]:
    match = _LAYER.fullmatch(name)
    if match is None:
        return _outer(name, parts, dimensions)
    if expert := _EXPERT.search(name):
        # With expert parallelism every expert is whole. Without, it is split over tensor ranks like a dense layer.
        width = dimensions.moe_ffn_hidden_size
        whole = parts[0].shape[1] == width if "linear_fc2" in name else len(parts[0]) == 2 * width
        renamed = _converted(name.replace(f"experts.{expert[0]}", ""), parts[:1] if whole else parts, dimensions)
        return {key.replace(".mlp.", f".mlp.experts.{expert[1]}."): value for key, value in renamed.items()}
    prefix, rest = f"model.layers.{match[1]}.", match[2]
    stack, _, number = rest.partition("@")
    if number:
        return {f"{prefix}{_STACKED[stack]}@{number}": parts[0]}
    if rest == "self_attention.core_attention.sinks":
        return {prefix + "self_attn.sinks": torch.cat(parts)}
    if dimensions.moe_bias and rest.startswith("mlp.router."):
        return {prefix + rest: parts[0]}
    replicated = _REPLICATED | (_LATENT_REPLICATED if isinstance(dimensions.attention, LatentAttention) else {})
    replicated |= _POST_NORMS if dimensions.post_norms else {}
    if rest in replicated:
        for part in parts[1:]:
            torch.testing.assert_close(part, parts[0], rtol=0, atol=1e-7, msg=f"{name} differs between tensor ranks")
        return {prefix + replicated[rest]: parts[0]}
    if rest in _LATENT_ROWS:
        return {prefix + _LATENT_ROWS[rest]: torch.cat(parts)}
    if rest.startswith("mlp.shared_experts."):
        renamed = _converted(name.replace("shared_experts.", ""), parts, dimensions)
        name = ".mlp.shared_expert." if dimensions.moe_shared_gate else ".mlp.shared_experts."
        return {key.replace(".mlp.", name): value for key, value in renamed.items()}
    if rest in _LINEAR:
        tensors = _LINEAR[rest](parts, dimensions)
        return {f"{prefix}linear_attn.{name}": tensor for name, tensor in tensors.items()}
    if rest.startswith("self_attention.linear_qkv."):
        return _split_qkv(prefix, rest.rsplit(".", 1)[1], torch.cat(parts), dimensions)
    if rest == "self_attention.linear_proj.weight":
        return {prefix + "self_attn.o_proj.weight": torch.cat(parts, dim=1)}
    if rest == "mlp.linear_fc1.weight":
        halves = [part.chunk(2) for part in parts]
        return {
            prefix + "mlp.gate_proj.weight": torch.cat([half[0] for half in halves]),
            prefix + "mlp.up_proj.weight": torch.cat([half[1] for half in halves]),
        }
    if rest == "mlp.linear_fc2.weight":
        return {prefix + "mlp.down_proj.weight": torch.cat(parts, dim=1)}
    raise KeyError(name)


def _in_proj(parts: list[Tensor], dimensions: ModelDimensions) -> dict[str, Tensor]:
    """Split the rows of each key head: query, key, values, their gates, steps and decays."""
    linear: Any = dimensions.attention.linear
    each = linear.num_value_heads // linear.num_key_heads
    by_head = torch.cat(parts).unflatten(0, (linear.num_key_heads, -1))
    if dimensions.family == "qwen3_next":
        qkvz, ba = by_head[:, : -2 * each], by_head[:, -2 * each :]
        return {"in_proj_qkvz.weight": qkvz.flatten(0, 1), "in_proj_ba.weight": ba.flatten(0, 1)}
    widths = [linear.key_dim, linear.key_dim, each * linear.value_dim, each * linear.value_dim, each, each]
    q, k, v, z, b, a = (part.flatten(0, 1) for part in by_head.split(widths, dim=1))
    names = ("qkv", "z", "b", "a")
    return {f"in_proj_{name}.weight": x for name, x in zip(names, (torch.cat([q, k, v]), z, b, a), strict=True)}


def _conv(parts: list[Tensor], dimensions: ModelDimensions) -> dict[str, Tensor]:
    linear: Any = dimensions.attention.linear
    channels = torch.cat(parts).unflatten(0, (linear.num_key_heads, -1)).split([linear.key_dim] * 2 + [
        linear.num_value_heads // linear.num_key_heads * linear.value_dim], dim=1)  # fmt: skip
    return {"conv1d.weight": torch.cat([each.flatten(0, 1) for each in channels])}


_LINEAR: dict[str, Any] = {
    "self_attention.in_proj.weight": _in_proj,
    "self_attention.conv_weight": _conv,
    "self_attention.A_log": lambda parts, _: {"A_log": torch.cat(parts)},
    "self_attention.dt_bias": lambda parts, _: {"dt_bias": torch.cat(parts)},
    "self_attention.out_proj.weight": lambda parts, _: {"out_proj.weight": torch.cat(parts, dim=1)},
}


def _outer(name: str, parts: list[Tensor], dimensions: ModelDimensions) -> dict[str, Tensor]:
    if name == "decoder.final_layernorm.weight":
        return {"model.norm.weight": parts[0]}
    if name == "score.weight":
        assert all(torch.equal(part, parts[0]) for part in parts[1:]), "value heads differ between tensor ranks"
        return {name: parts[0]}
    rows = torch.cat(parts)
    assert not rows[dimensions.vocab_size :].any(), f"padding rows of {name} are not zero"
    tied_or_input = dimensions.tied_embeddings or "embedding" in name
    return {"model.embed_tokens.weight" if tied_or_input else "lm_head.weight": rows[: dimensions.vocab_size]}


def _split_qkv(prefix: str, kind: str, fused: Tensor, dimensions: ModelDimensions) -> dict[str, Tensor]:
    """Split a fused tensor, in which every query group has its queries, its key and its value."""
    groups, width = dimensions.num_kv_heads, dimensions.head_dim
    queries = dimensions.num_heads // groups * (2 if dimensions.attention.output_gate else 1)
    grouped = fused.view(groups, queries + 2, width, *fused.shape[1:])
    pieces = {"q": grouped[:, :queries], "k": grouped[:, queries], "v": grouped[:, queries + 1]}
    return {
        f"{prefix}self_attn.{letter}_proj.{kind}": piece.reshape(-1, *fused.shape[1:])
        for letter, piece in pieces.items()
    }


def stacked_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert a checkpoint's tensors to those of Hugging Face's module: stacked experts, gate rows above up rows."""
    experts = [name for name in tensors if ".experts." in name and name.endswith("_proj.weight")]
    stacked = {name: tensor for name, tensor in tensors.items() if name not in experts}
    for prefix in dict.fromkeys(name.partition(".experts.")[0] for name in experts):
        count = sum(name.startswith(f"{prefix}.experts.") and name.endswith(".down_proj.weight") for name in experts)
        of = {kind: [tensors[f"{prefix}.experts.{n}.{kind}_proj.weight"] for n in range(count)]
              for kind in ("gate", "up", "down")}  # fmt: skip
        gate_up = [torch.cat(pair) for pair in zip(of["gate"], of["up"], strict=True)]
        stacked[f"{prefix}.experts.gate_up_proj"] = torch.stack(gate_up)
        stacked[f"{prefix}.experts.down_proj"] = torch.stack(of["down"])
    return stacked
