"""Packed core attention, which Megatron's attention layer calls between its projections, and how it is chosen."""

import os
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from backends.common.attention import AnyAttention
from backends.common.step.balance import RoutedTokens
from backends.common.step.packs import ResponseRows
from backends.megatron.parallel import new_parameter
from backends.megatron.rotary import apply_rotary
from slime_like.algorithms.context import Layout
from slime_like.checks.packages import (
    attention_problems,
    has_transformer_engine,
    missing_compiler,
    missing_flash_attention,
    variables_against_megatron,
)
from slime_like.config import ModelConfig, RunConfig, TrainerConfig
from slime_like.models.dimensions import ModelDimensions

Attention = Literal["transformer_engine", "ring_flash_attn", "ring", "allgather"]


def attention_of(trainer: TrainerConfig, dimensions: ModelDimensions, on_cuda: bool) -> Attention:
    """Return the configured attention. ``auto`` is Transformer Engine if it can run, otherwise the ring, and the
    all-gather if sequences share prefixes or layers have windows."""
    if trainer.attention != "auto":
        return trainer.attention
    if trainer.share_prefixes or dimensions.attention.window is not None:
        return "allgather"
    return "transformer_engine" if uses_transformer_engine(trainer, dimensions, on_cuda) else "ring"


def uses_transformer_engine(trainer: TrainerConfig, dimensions: ModelDimensions, on_cuda: bool) -> bool:
    """Return whether the layers use Transformer Engine's modules. ``auto`` uses them whenever they can run, even around
    the attention of shared prefixes."""
    if trainer.attention != "auto":
        return trainer.attention == "transformer_engine"
    return on_cuda and not dimensions.attention.special and has_transformer_engine()


def for_lora(config: RunConfig) -> RunConfig:
    """Avoid Transformer Engine's layers in ``auto`` if there are low-rank factors: a layer that contains the norm does
    not return the factors' input."""
    if not config.model.lora.is_set or config.trainer.attention != "auto":
        return config
    if ModelDimensions.from_checkpoint(config.model.path).attention.special:  # never has these layers
        return config
    attention = "allgather" if config.trainer.share_prefixes else "ring"
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"attention": attention})})


def context_layout_of(attention: Attention) -> Layout:
    """Return the layout of packs: zigzag for rings (Transformer Engine's is one), contiguous for gathered keys."""
    return "contiguous" if attention in ("allgather", "ring_flash_attn") else "zigzag"


def fp8_alignment(trainer: TrainerConfig) -> int:
    """Return a number that each rank's tokens must be a multiple of.

    Weight gradients in FP8 sum over tokens in steps of 16. With sequence parallelism, blocks of 128 tokens must not
    cross ranks: Transformer Engine would send 16 bits, and round twice.
    """
    if trainer.fp8 == "none":
        return 1
    return 128 if trainer.fp8 == "blockwise" and trainer.parallel.sequence else 16


def machine_problems(trainer: TrainerConfig, model: ModelConfig, on_cuda: bool) -> list[str]:
    """List reasons why this rank's machine cannot run the requested attention, each with a remedy."""
    problems = list(attention_problems(trainer, model))
    if trainer.attention == "transformer_engine" and not on_cuda:
        problems.append(
            "trainer.attention=transformer_engine needs a CUDA device, but there is none; use trainer.attention=auto, "
            "which is Transformer Engine if it can run"
        )
    if trainer.fp8 != "none" and not (on_cuda and torch.cuda.get_device_capability() >= (9, 0)):
        problems.append(f"trainer.fp8={trainer.fp8} needs a GPU of Hopper's generation or newer; use none")
    if trainer.attention == "transformer_engine" and model.lora.is_set:
        problems.append("trainer.attention=transformer_engine does not support model.lora; use auto")
    return [
        *problems,
        *variables_against_megatron(os.environ),
        *missing_flash_attention(trainer, on_cuda),
        *missing_compiler(on_cuda),
    ]


@dataclass
class PackedLayout(PackedSeqParams):
    """Layer inputs of one micro-batch besides hidden states, passed along with the micro-batch.

    Attributes:
        cos, sin: (T_local, 1, rotary_dim / 2) rotary table of the local tokens.
        window_table: the same, cos and sin, in layers with a sliding window, if they have another one.
        interleaved: rotate adjacent elements instead of elements half a head apart.
        attention: computes within the sequences' boundaries; None for Transformer Engine's.
        recurrence: ``Recurrence``, which does it in recurrent layers, if the model has some.
        routed: what routers need, if they balance or replay.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    window_table: tuple[Tensor, Tensor] | None = None
    interleaved: bool = False
    attention: AnyAttention | None = None
    recurrence: Any = None
    responses: ResponseRows | None = None
    routed: RoutedTokens | None = None

    @classmethod
    def require(cls, packed_seq_params: Self | None) -> Self:
        """Return the layout passed to a layer, which is never missing."""
        assert packed_seq_params is not None
        return packed_seq_params

    def rotate(self, *heads: Tensor, slides: bool = False) -> tuple[Tensor, ...]:
        """Rotate queries or keys, (T_local, heads, rotary_dim) each, to their positions."""
        cos, sin = (self.window_table if slides else None) or (self.cos, self.sin)
        assert cos is not None and sin is not None
        return tuple(apply_rotary(x, cos, sin, self.interleaved) for x in heads)


class PackedCoreAttention(torch.nn.Module):
    """Causal attention inside every sequence of a pack, with rotary embedding, on one rank or over the context group.

    A drop-in replacement for Megatron's ``core_attention``. It takes (T, H, D) queries and (T, G, D) keys and values,
    and reads boundaries and angles only from the micro-batch's ``PackedLayout``.

    Attributes:
        rotates: queries and keys arrive without rotary embedding.
        window: keys that a query sees at most, its own included; ``None`` for all.
        sinks: scores of this rank's heads that no value belongs to, or ``None``.
    """

    rotates: ClassVar[bool] = True

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        windows, self._groups = config.window_attn_skip_freq, pg_collection
        self.window: int | None = windows[layer_number - 1] or None if windows else None
        self.sinks: Any = None
        if config.softmax_type == "learnable":
            self.sinks = new_parameter(config, (config.num_attention_heads // pg_collection.tp.size(),))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedLayout | None = None,
    ) -> Tensor:
        """Return (T, H * D), where D is the values' head size."""
        layout = PackedLayout.require(packed_seq_params)
        if self.rotates:
            query, key = layout.rotate(query, key, slides=self.window is not None)
        assert layout.attention is not None
        out = layout.attention.attend(query, key, value, self.scale, self.window, self.sinks)
        return out.reshape(out.shape[0], -1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Describe the sinks, if there are any, as a part of the tensor on disk."""
        own = dict(self.named_parameters())
        groups = {"tp_group": self._groups.tp, "dp_cp_group": metadata["dp_cp_group"]} if own else {}
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(own, 0), sharded_offsets, **groups
        )
        return state


class RotatedCoreAttention(PackedCoreAttention):
    """Packed attention for queries and keys that already have rotary embedding."""

    rotates = False
