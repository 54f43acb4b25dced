"""Check of models that this project's kernels can decode. Needs no kernel itself."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rollout.transformers.attention import GROUPED_SDPA

_CLASSES = frozenset(
    f"transformers.models.{family}.modeling_{family}.{name}ForCausalLM"
    for family, name in (("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"))
)
_ROTARY_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Their frequencies depend on nothing but the configuration."""

_SMALL = 256
"""Hidden size up to which what an operator costs decides, however many threads torch has."""


def not_plain(model: Any) -> str | None:
    """Why a token of each row must go through transformers' own forward; None if ``FusedDecoder`` computes the same.

    It knows Llama, Mistral, Qwen2 and Qwen3, with or without biases, tied embeddings and sliding windows, in float32 on
    a CPU, as transformers makes them: replaced layers are not looked into. It has one thread.
    """
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if kind not in _CLASSES:
        return f"{kind} is no model whose layers are known"
    config, threads = model.config, torch.get_num_threads()
    if threads > 1 and config.hidden_size > _SMALL:
        return f"torch has {threads} threads, and the kernels one"
    if config._attn_implementation != GROUPED_SDPA:
        return f"attn_implementation={config._attn_implementation} was asked for"
    if config.hidden_act != "silu":
        return f"the activation is {config.hidden_act}"
    rotary = model.model.rotary_emb.rope_type
    if rotary not in _ROTARY_TYPES:
        return f"rotary embeddings of type {rotary} depend on the length of the context"
    other = [type(module).__name__ for module in _linears(model) if type(module) is not nn.Linear]
    if other:
        return f"a projection is a {other[0]}"
    strange = [name for name, p in model.named_parameters() if not _is_plain(p)]
    return f"{strange[0]} is not a contiguous float32 tensor on the CPU" if strange else None


def _linears(model: Any) -> Iterator[nn.Module]:
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    yield model.lm_head


def _is_plain(parameter: torch.Tensor) -> bool:
    return parameter.dtype == torch.float32 and parameter.device.type == "cpu" and parameter.is_contiguous()
