"""One rank's model input from a pack: its context shard, boundaries, angles and response rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core import parallel_state
from torch import Tensor

from backends.common.attention import choose_attention
from backends.common.step.balance import NO_BALANCE, Balance, RoutedTokens
from backends.common.step.packs import MicroBatch, ResponseRows, on_device, require_computable
from backends.common.step.routes import Replay
from backends.megatron.attention import PackedLayout, attention_of, context_layout_of, fp8_alignment
from backends.megatron.rotary import Rotary, rotary_table
from slime_like.algorithms.context import ContextShard, split_for_context_parallel
from slime_like.algorithms.packing.pack import zero_weight_pack
from slime_like.config import TrainerConfig
from slime_like.models.dimensions import ModelDimensions
from slime_like.plugins.options import load_option
from slime_like.trajectory import PackedTrajectory


@dataclass(slots=True)
class ModelInput(MicroBatch):
    """One pack on this rank's device. ``layout`` holds the layers' inputs besides hidden states."""

    layout: PackedLayout


class BatchBuilder:
    """Builder of micro-batches for this rank of the configured layout, whose groups must exist."""

    def __init__(
        self, trainer: TrainerConfig, dtype: torch.dtype, dimensions: ModelDimensions, device: torch.device
    ) -> None:
        self._device = device
        self._vocab_size = dimensions.vocab_size
        self._dtype = dtype
        self._rotary = Rotary.of(dimensions, device)
        self._window_rotary = None
        if (theta := dimensions.attention.window_theta) is not None:
            self._window_rotary = Rotary.of(replace(dimensions, rope_theta=theta, rope_scaling=None), device)
        self._is_recurrent = dimensions.attention.linear is not None
        self._context_group = parallel_state.get_context_parallel_group()
        # The attention determines how packs are split over these ranks.
        self._attention = attention_of(trainer, dimensions, torch.cuda.is_available())
        layout = trainer.parallel
        # Ranks that share a context shard's tokens; local token counts are multiples of their number.
        self._sequence_group = parallel_state.get_tensor_model_parallel_group() if layout.sequence else None
        self._alignment = fp8_alignment(trainer) * (layout.tensor if layout.sequence else 1)
        # Interleaved schedules need a multiple of the pipeline's size, all of the same length.
        self._multiple = layout.pipeline if layout.virtual_pipeline > 1 else None

    def build(
        self, packs: Sequence[PackedTrajectory], balance: Balance = NO_BALANCE, replay: Replay | None = None
    ) -> list[ModelInput]:
        """Take this rank's part of every pack. If required, adds packs without weight, and pads."""
        missing = -len(packs) % (self._multiple or 1)
        given = [*packs, *(zero_weight_pack(packs[0]) for _ in range(missing))]
        for pack in given:
            require_computable(pack, self._vocab_size)
        shards = [self._shard(pack, self._alignment) for pack in given]
        if self._multiple is not None:
            longest = max(shard.tokens.numel() for shard in shards)
            shards = [self._shard(pack, longest) for pack in given]
        return [self._input(pack, shard, balance, replay) for pack, shard in zip(given, shards, strict=True)]

    def _shard(self, pack: PackedTrajectory, multiple_of: int) -> ContextShard:
        size, rank = self._context_group.size(), self._context_group.rank()
        layout = context_layout_of(self._attention)
        return split_for_context_parallel(pack, size, rank, layout=layout, multiple_of=multiple_of)

    def _input(
        self, pack: PackedTrajectory, shard: ContextShard, balance: Balance, replay: Replay | None
    ) -> ModelInput:
        layout = self._layout(pack, shard)
        layout.routed = RoutedTokens.of(pack, shard, self._rows(shard), balance, replay)
        needed = replace(pack, teacher_hidden=None)  # ``layout`` has this rank's part
        moved, shard, layout = on_device((needed, shard, layout), self._device)
        layout.cos, layout.sin = self._table(self._rotary, shard)
        layout.window_table = None if self._window_rotary is None else self._table(self._window_rotary, shard)
        return ModelInput(pack, moved, shard, self._context_group, layout)

    def _table(self, rotary: Rotary, shard: ContextShard) -> tuple[Tensor, Tensor]:
        cos, sin = rotary_table(rotary.inv_freq, shard.position_ids, torch.float32)
        return (cos * rotary.magnitude).to(self._dtype), (sin * rotary.magnitude).to(self._dtype)

    def _layout(self, pack: PackedTrajectory, shard: ContextShard) -> PackedLayout:
        """Compute everything that attention and head need, except the rotary table."""
        boundaries, name = shard.cu_seqlens_padded, self._attention
        return PackedLayout(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            cu_seqlens_q_padded=boundaries,
            cu_seqlens_kv_padded=boundaries,
            max_seqlen_q=shard.max_seqlen_padded,
            max_seqlen_kv=shard.max_seqlen_padded,
            interleaved=self._rotary.interleaved,
            # Transformer Engine's attention reads the fields that Megatron defines.
            attention=None if name == "transformer_engine" else choose_attention(name, shard, self._context_group),
            recurrence=load_option("recurrence").of(shard, self._context_group) if self._is_recurrent else None,
            responses=ResponseRows.of(pack, shard),
        )

    def _rows(self, shard: ContextShard) -> slice:
        """Return the part of the local token axis that this rank's layers process outside attention."""
        if self._sequence_group is None:
            return slice(None)
        count = shard.tokens.numel() // self._sequence_group.size()
        return slice(self._sequence_group.rank() * count, (self._sequence_group.rank() + 1) * count)
