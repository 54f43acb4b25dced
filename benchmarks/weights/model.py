"""Make the tensors of a model of half a billion parameters without a download."""

from collections.abc import Iterator

import torch
from torch import Tensor

from slime_like.interfaces import WeightBucket

HIDDEN, LAYERS, FFN, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 896, 24, 4864, 151936, 14, 2, 64


def half_billion(seed: int = 0) -> dict[str, Tensor]:
    """Return random bfloat16 tensors with Qwen2.5-0.5B's names and shapes (tied embedding, 494 M elements)."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)
        for name, shape in _shapes()
    }


def buckets_of(tensors: dict[str, Tensor], bucket_bytes: int) -> Iterator[WeightBucket]:
    """Cut tensors into buckets like trainers: in order, at most ``bucket_bytes``, larger tensors on their own."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if bucket and size + nbytes > bucket_bytes:
            yield WeightBucket(bucket)
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += nbytes
    yield WeightBucket(bucket)


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (heads * HEAD_DIM, HIDDEN)
            yield f"{prefix}.self_attn.{name}_proj.bias", (heads * HEAD_DIM,)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield f"{prefix}.mlp.gate_proj.weight", (FFN, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", (FFN, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, FFN)
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
