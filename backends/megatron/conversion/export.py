"""Export of the ranks' shards as full tensors under Hugging Face names, streamed in buckets."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from backends.common.hugging_face.directory import SHARD_BYTES, write_hf_directory
from backends.common.hugging_face.files import in_files
from backends.megatron.conversion.placement import PlacedParameter, local_experts, place_lora_weights, place_parameters
from backends.megatron.families import family_of
from backends.megatron.families.transforms import Piece, Shape
from slime_like.config import LoraConfig
from slime_like.interfaces import Manifest, WeightBucket, WeightExport
from slime_like.interfaces.conversion import TensorInfo
from slime_like.interfaces.weights import MODEL, dtype_name
from slime_like.models.dimensions import ModelDimensions
from slime_like.weights.adapter import ADAPTER, factor_shapes

_ALIGNMENT = 64


def export_buckets(
    model_chunks: Sequence[GPTModel], dimensions: ModelDimensions, bucket_bytes: int, only_adapter: bool = False
) -> WeightExport:
    """Stream this pipeline stage's tensors in the parameters' type, at most ``bucket_bytes`` per bucket.

    A single larger tensor gets its own bucket. The first rank of each stage yields the tensors. Ranks with other shards
    of them take part bucket by bucket: they yield the same number of empty buckets. All other ranks yield nothing. A
    tensor may be a view of the model's memory, so it is valid only until the next bucket is requested.

    Shards of as many parameters as fill a bucket are gathered together. Low-rank factors are added to their weights on
    every rank before that.

    Args:
        only_adapter: export the factors instead, under PEFT's names.

    Raises:
        CheckpointError: no rule covers a parameter.
    """
    exported = (place_lora_weights if only_adapter else _exported)(model_chunks, dimensions)
    updates = ADAPTER if only_adapter else MODEL
    return WeightExport(_manifest(exported, updates) if _sends() else None, _stream(exported, bucket_bytes))


def _manifest(exported: Sequence[PlacedParameter], updates: str) -> Manifest:
    return Manifest(
        {
            name: TensorInfo(dtype_name(item.parameter.dtype), tuple(shape))
            for item in exported
            for expert in _expert_numbers(item)
            for name, shape in zip(item.source_names(expert), item.shapes, strict=True)
        },
        updates,
    )


def export_gradients(
    model_chunks: Sequence[GPTModel], dimensions: ModelDimensions, bucket_bytes: int
) -> Iterator[WeightBucket]:
    """Export like ``export_buckets``, but the gradient sums of Megatron's DDP (``main_grad``), whole on every rank.

    A gradient has its parameter's memory layout, so it is exported like one. Weights without gradients are left out.
    """
    exported = [*_exported(model_chunks, dimensions), *place_lora_weights(model_chunks, dimensions)]
    trained: list[Any] = [item for item in exported if item.parameter.requires_grad]
    yield from _stream([replace(item, parameter=item.parameter.main_grad) for item in trained], bucket_bytes)


def save_hf(
    model_chunks: Sequence[GPTModel],
    dimensions: ModelDimensions,
    source_dir: Path,
    directory: Path,
    shard_bytes: int = SHARD_BYTES,
    lora: LoraConfig | None = None,
) -> None:
    """Write the weights as sharded safetensors with an index, and ``source_dir``'s configuration and tokenizer.

    With the settings ``lora``, write the factors as a PEFT adapter instead.

    The directory appears only once it is complete. Collective over the world; ``directory`` must be on a file system
    that all pipeline stages share.
    """
    parameter = next(model_chunks[0].parameters())
    shapes = family_of(dimensions).hf_shapes(dimensions)
    write_hf_directory(
        export_buckets(model_chunks, dimensions, shard_bytes, only_adapter=lora is not None),
        shapes if lora is None else factor_shapes(lora, shapes),
        source_dir,
        directory,
        parallel_state.get_pipeline_model_parallel_rank(),
        parameter.dtype,
        parameter.device,
        lora,
    )


def _exported(model_chunks: Sequence[GPTModel], dimensions: ModelDimensions) -> list[PlacedParameter]:
    return [placed for placed in place_parameters(model_chunks, dimensions) if placed.rule.exported]


def _is_first_replica() -> bool:
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0


def _sends() -> bool:
    return _is_first_replica() and parallel_state.get_tensor_model_parallel_rank() == 0


def _stream(exported: Sequence[PlacedParameter], bucket_bytes: int) -> Iterator[WeightBucket]:
    """Gather, merge and yield the tensors of ``exported``."""
    first, first_of_experts = _is_first_replica(), parallel_state.get_expert_data_parallel_rank() == 0
    if not (first or first_of_experts):
        return

    def nbytes(placement: PlacedParameter) -> int:
        whole = sum(math.prod(shape) for shape in placement.shapes) * placement.parameter.element_size()
        return whole * len(_expert_numbers(placement))

    batches = in_files(exported, nbytes, bucket_bytes)  # consecutive parameters, gathered together
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    expert_group = parallel_state.get_expert_tensor_and_model_parallel_group()
    for batch in batches:
        split = [item for item in batch if item.rule.transform.sharded and not _of_experts(item)]
        shards = _gathered(split, tensor_group) if first else {}
        if first_of_experts:
            shards |= _gathered([item for item in batch if _of_experts(item)], expert_group)
        parts = (part for item in batch for part in _tensors(item, shards, _sends()))
        yield from _buckets(parts, bucket_bytes)


def _of_experts(placement: PlacedParameter) -> bool:
    """Return whether it is a parameter of experts, which differ between expert-parallel ranks."""
    return placement.expert is not None or placement.rule.stacked


def _gathered(placements: Sequence[PlacedParameter], group: dist.ProcessGroup) -> dict[str, list[Tensor]]:
    """Gather every rank's shard of each parameter on the group's first rank, by name, in one exchange."""
    shards = [item.value for item in placements]
    if not shards:
        return {}
    if group.size() == 1:
        return {item.name: [shard] for item, shard in zip(placements, shards, strict=True)}
    packed = torch.empty(sum(map(_aligned_bytes, shards)), dtype=torch.uint8, device=shards[0].device)
    for view, shard in zip(_unpacked(shards, packed), shards, strict=True):
        view.copy_(shard)
    by_rank = [torch.empty_like(packed) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(packed, by_rank, group=group, group_dst=0)
    everyones = [_unpacked(shards, buffer) for buffer in by_rank or ()]
    return {item.name: [parts[index] for parts in everyones] for index, item in enumerate(placements) if everyones}


def _aligned_bytes(shard: Tensor) -> int:
    return -(-shard.nbytes // _ALIGNMENT) * _ALIGNMENT


def _unpacked(like: Sequence[Tensor], buffer: Tensor) -> list[Tensor]:
    """Return consecutive views of ``buffer``, (n,) uint8, with the types and shapes of ``like``."""
    views, offset = [], 0
    for shard in like:
        views.append(buffer[offset : offset + shard.nbytes].view(shard.dtype).view(shard.shape))
        offset += _aligned_bytes(shard)
    return views


def _buckets(parts: Iterable[tuple[str, Tensor | None, int]], bucket_bytes: int) -> Iterator[WeightBucket]:
    """Group parts into buckets. Parts without a tensor, on ranks that only take part, count only by size."""
    bucket: list[tuple[str, Tensor]] = []
    room = bucket_bytes
    for name, tensor, nbytes in parts:
        if nbytes > room and room < bucket_bytes:
            yield WeightBucket(bucket)
            bucket, room = [], bucket_bytes
        room -= nbytes
        if tensor is not None:
            bucket.append((name, tensor))
    yield WeightBucket(bucket)


def _tensors(
    placement: PlacedParameter, shards: dict[str, list[Tensor]], sends: bool
) -> Iterator[tuple[str, Tensor | None, int]]:
    """Yield name, full tensor (on the sender) and its size in bytes, in the same order on every rank of the stage."""
    experts = _expert_numbers(placement)
    names = [name for expert in experts for name in placement.source_names(expert)]
    sizes = [math.prod(shape) * placement.parameter.element_size() for shape in placement.shapes * len(experts)]
    if not sends:
        yield from zip(names, [None] * len(names), sizes, strict=True)
        return
    gathered = shards.get(placement.name) or [placement.value]
    sharded = placement.rule.transform.sharded
    per_expert = placement.tp.size if sharded or placement.expert is not None else 1
    used = per_expert if sharded else 1
    slices = [gathered[start : start + used] for start in range(0, len(gathered), per_expert)]
    yield from zip(names, [tensor for part in slices for tensor in merge_shards(placement, part)], sizes, strict=True)


def _expert_numbers(placement: PlacedParameter) -> list[int | None]:
    """Return the experts at this parameter's position on the expert-parallel ranks, in rank order."""
    if placement.expert is None:
        return [None]
    count = local_experts(placement.dimensions)
    ranks = parallel_state.get_expert_model_parallel_world_size()
    return [placement.expert % count + rank * count for rank in range(ranks)]


def merge_shards(placement: PlacedParameter, shards: Sequence[Tensor]) -> list[Tensor]:
    """Merge the shards of all tensor-parallel ranks into full Hugging Face tensors; views if nothing has to move."""
    parts: list[list[tuple[Piece, Tensor]]] = [[] for _ in placement.shapes]
    for rank, shard in enumerate(shards):
        for piece in placement.pieces(rank):
            parts[piece.source].append((piece, shard))
    return [_joined(shape, pieces) for shape, pieces in zip(placement.shapes, parts, strict=True)]


def _joined(shape: Shape, parts: Sequence[tuple[Piece, Tensor]]) -> Tensor:
    first = parts[0][0].view(parts[0][1])
    if len(parts) == 1 and first.is_contiguous():
        return first.view(shape)
    full = first.new_empty(shape)
    for piece, shard in parts:
        view = piece.view(shard)
        full.narrow(piece.axis, piece.start, piece.length).view(view.shape).copy_(view)
    return full
