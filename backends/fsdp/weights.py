"""Loading and exporting of the ranks' weight shards, under Hugging Face checkpoint names."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from backends.common.hugging_face.files import HfCheckpoint, Shape
from backends.common.process.agreement import together
from backends.fsdp.model import LogprobModel
from backends.fsdp.names import pieces, stored_shapes
from backends.fsdp.parallel import rows_of_rank
from slime_like.interfaces import Manifest, WeightBucket
from slime_like.interfaces.conversion import TensorInfo
from slime_like.interfaces.weights import dtype_name
from slime_like.models.dimensions import EMBEDDING, HEADS, ModelDimensions


def shard_of(parameter: Tensor) -> Tensor:
    """Return a view of this rank's rows."""
    if not isinstance(parameter, DTensor):
        raise TypeError(f"a {type(parameter).__name__} is not a sharded tensor")
    return parameter.to_local()


def checkpoint_shapes(model: LogprobModel) -> dict[str, Shape]:
    """Return names and shapes of a whole checkpoint of this model."""
    shapes: dict[str, Shape] = {}
    for name, tensor in (model.parameters_by_name() | model.kept_by_name()).items():
        shapes |= stored_shapes(name, tuple(tensor.shape))
    return shapes


def load_hf_weights(model: LogprobModel, directory: Path, device: torch.device) -> None:
    """Fill every parameter and router bias from a Hugging Face checkpoint. Collective over the world.

    Each rank reads only its rows.

    Raises:
        CheckpointError: missing or unexpected tensors, wrong shapes, damaged files, NaN or infinity; on every rank,
            even if only one found it.
    """
    what = f"loading {directory}"
    with together(lambda: _open_checked(model, directory), what, device) as checkpoint:
        together(lambda: _fill_all(model, checkpoint), what, device)


def _open_checked(model: LogprobModel, directory: Path) -> HfCheckpoint:
    checkpoint = HfCheckpoint(directory)
    expected = checkpoint_shapes(model)
    dimensions, tied = ModelDimensions.from_checkpoint(directory), model.tied_names()
    checkpoint.require(expected, tied | {name for name in checkpoint.shapes() if dimensions.is_draft(name)})
    if dist.get_rank() == 0 and EMBEDDING in expected:  # only this rank reads more than its part
        checkpoint.require_copies(tied.intersection(HEADS, checkpoint.shapes()), EMBEDDING)
    return checkpoint


@torch.no_grad()
def _fill_all(model: LogprobModel, checkpoint: HfCheckpoint) -> None:
    for name, parameter in model.parameters_by_name().items():
        for piece in pieces(name, shard_of(parameter), rows_of_rank(parameter).start):
            if piece.view.numel():
                values = checkpoint.read(piece.name, 0, piece.start, len(piece.view))
                piece.view.copy_(values)
    for name, bias in model.kept_by_name().items():
        bias.copy_(checkpoint.read(name, 0, 0, len(bias)))


def export_manifest(model: LogprobModel, dtype: torch.dtype) -> Manifest | None:
    """Return the tensors that ``export_buckets`` yields on this rank; ``None`` if it yields none."""
    if dist.get_rank() > 0:
        return None
    types, shapes = {name: bias.dtype for name, bias in model.kept_by_name().items()}, checkpoint_shapes(model)
    return Manifest({name: TensorInfo(dtype_name(types.get(name, dtype)), shape) for name, shape in shapes.items()})


@torch.no_grad()
def export_buckets(
    model: LogprobModel,
    dtype: torch.dtype,
    bucket_bytes: int,
    device: torch.device,
    rows: Mapping[str, Tensor] | None = None,
) -> Iterator[WeightBucket]:
    """Stream all tensors in ``dtype``, at most ``bucket_bytes`` per bucket. A single larger parameter gets its own
    bucket. Router biases stay in float32: rounding would change the chosen experts.

    Collective over the world: the first rank yields the tensors, the others the same number of empty buckets. Besides
    the bucket, only one parameter is whole at a time; no rank ever holds the model.

    Args:
        rows: this rank's rows of other tensors with the parameters' shapes, such as gradients, by model name. Router
            biases have none.
    """
    bucket: list[tuple[str, Tensor]] = []
    nbytes = 0
    kept = model.kept_by_name() if rows is None else {}
    for name, tensor in (model.parameters_by_name() | kept).items():
        size = tensor.nbytes if name in kept else tensor.numel() * dtype.itemsize
        if nbytes and nbytes + size > bucket_bytes:
            yield WeightBucket(bucket)
            bucket, nbytes = [], 0
        if name in kept:
            whole = tensor.clone()
        else:
            shard = shard_of(tensor).detach() if rows is None else rows[name]
            whole = _joined(shard, tensor.shape, dtype, device)
        nbytes += size
        if dist.get_rank() == 0:
            bucket += [(piece.name, piece.view) for piece in pieces(name, whole)]
    yield WeightBucket(bucket)


def _joined(shard: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Gather the tensor of ``shape`` from each rank's rows."""
    size, shard = dist.get_world_size(), shard.to(device, dtype)
    if size == 1:
        return shard
    rows = -(-shape[0] // size)
    padded = shard.new_zeros(rows, *shape[1:])
    padded[: len(shard)] = shard
    whole = shard.new_empty(size * rows, *shape[1:])
    dist.all_gather_into_tensor(whole, padded)
    return whole[: shape[0]]
