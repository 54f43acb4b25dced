"""From the ranks' shards to full tensors under Hugging Face names, streamed in buckets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from backends.megatron.conversion.placement import Placement, local_experts, place_parameters
from backends.megatron.conversion.transforms import Piece, Shape
from slime_like.config.dimensions import ModelDimensions
from slime_like.interfaces import WeightBucket


def export_buckets(
    model_chunks: Sequence[GPTModel], dimensions: ModelDimensions, bucket_bytes: int
) -> Iterator[WeightBucket]:
    """Stream this pipeline stage's tensors in the parameters' own type, at most ``bucket_bytes`` a bucket.

    A single larger tensor travels alone. The first rank of each stage yields the tensors. The ranks that hold other
    shards of them take part bucket by bucket: they yield as many buckets, empty ones. All other ranks yield nothing.
    A tensor may be a view of the model's own memory: it is valid until the next bucket is asked for.

    Raises:
        CheckpointError: a parameter that no rule covers.
    """
    role = _Role.of_this_rank()
    if not (role.dense or role.expert):
        return
    bucket: list[tuple[str, Tensor]] = []
    nbytes = 0
    for name, tensor, size in _stream(place_parameters(model_chunks, dimensions), role):
        if nbytes and nbytes + size > bucket_bytes:
            yield WeightBucket(bucket)
            bucket, nbytes = [], 0
        nbytes += size
        if tensor is not None:
            bucket.append((name, tensor))
    if nbytes:
        yield WeightBucket(bucket)


@dataclass(frozen=True, slots=True)
class _Role:
    """What this rank does in an export: send, or hand its shards of dense or of expert tensors to the sender."""

    sender: bool
    dense: bool
    expert: bool

    @classmethod
    def of_this_rank(cls) -> _Role:
        first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        return cls(
            sender=first and parallel_state.get_tensor_model_parallel_rank() == 0,
            dense=first,
            expert=parallel_state.get_expert_data_parallel_rank() == 0,
        )


def _stream(placements: Sequence[Placement], role: _Role) -> Iterator[tuple[str, Tensor | None, int]]:
    """Name, full tensor (on the sender) and its size in bytes, in the same order on every rank of the stage."""
    for placement in placements:
        if not placement.rule.exported:
            continue
        experts = _expert_numbers(placement)
        tensors: list[Tensor] | None = _full_tensors(placement, role)
        shapes = placement.shapes * len(experts)
        names = [name for expert in experts for name in placement.source_names(expert)]
        for index, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            yield name, tensors[index] if tensors else None, math.prod(shape) * placement.parameter.element_size()


def _expert_numbers(placement: Placement) -> list[int | None]:
    """The experts that stand at this parameter's place on the expert-parallel ranks, in rank order."""
    if placement.expert is None:
        return [None]
    count = local_experts(placement.dimensions)
    ranks = parallel_state.get_expert_model_parallel_world_size()
    return [placement.expert % count + rank * count for rank in range(ranks)]


def _full_tensors(placement: Placement, role: _Role) -> list[Tensor] | None:
    """On the sender, the full Hugging Face tensors, expert by expert; ``None`` on ranks that only take part."""
    if placement.expert is None:
        group = parallel_state.get_tensor_model_parallel_group() if placement.rule.transform.sharded else None
        takes_part = role.dense
    else:
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        takes_part = role.expert
    shards = _gather(placement.parameter.data, group) if takes_part else None
    if shards is None or not role.sender:
        return None
    per_expert = placement.tp.size if placement.rule.transform.sharded else 1
    slices = [shards[start : start + per_expert] for start in range(0, len(shards), per_expert)]
    return [tensor for own in slices for tensor in merge_shards(placement, own)]


def _gather(shard: Tensor, group: dist.ProcessGroup | None) -> list[Tensor] | None:
    """Every rank's ``shard`` on the group's first rank, in rank order; ``None`` on the others."""
    if group is None or group.size() == 1:
        return [shard]
    first = group.rank() == 0
    shards = [torch.empty_like(shard) for _ in range(group.size())] if first else None
    dist.gather(shard, shards, group=group, group_dst=0)
    return shards


def merge_shards(placement: Placement, shards: Sequence[Tensor]) -> list[Tensor]:
    """Full Hugging Face tensors from the shards of all tensor-parallel ranks; views where nothing has to move."""
    parts: list[list[tuple[Piece, Tensor]]] = [[] for _ in placement.shapes]
    for rank, shard in enumerate(shards):
        for piece in placement.pieces(rank):
            parts[piece.source].append((piece, shard))
    return [_joined(shape, own) for shape, own in zip(placement.shapes, parts, strict=True)]


def _joined(shape: Shape, parts: Sequence[tuple[Piece, Tensor]]) -> Tensor:
    if len(parts) == 1:
        piece, shard = parts[0]
        return piece.view(shard).reshape(shape)
    full = parts[0][1].new_empty(shape)
    for piece, shard in parts:
        view = piece.view(shard)
        full.narrow(piece.axis, piece.start, piece.length).view(view.shape).copy_(view)
    return full
