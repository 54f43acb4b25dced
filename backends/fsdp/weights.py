"""Loading and exporting of the ranks' weight shards, under Hugging Face checkpoint names."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from backends.common.hugging_face.files import HfCheckpoint, Shape, ValueModel
from backends.common.process.agreement import together
from backends.common.trainer.lora import Initial
from backends.fsdp.model import FsdpModel
from backends.fsdp.names import TensorRows
from backends.fsdp.parallel import gather_tensor, rows_of_rank, shard_of
from slime_like.interfaces import Manifest, WeightBucket
from slime_like.interfaces.conversion import TensorInfo
from slime_like.interfaces.weights import MODEL, dtype_name
from slime_like.models.dimensions import EMBEDDING, HEADS


def checkpoint_shapes(model: FsdpModel) -> dict[str, Shape]:
    """Return names and shapes of a whole checkpoint of this model."""
    return piece_shapes(model, model.own_by_name() | model.kept_by_name())


def piece_shapes(model: FsdpModel, tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Return names and shapes of the stored tensors that make up ``tensors``, whose names are the model's."""
    whole = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    stored = (piece for each in whole.items() for piece in model.pieces(*each))
    return {piece.name: tuple(piece.view.shape) for piece in stored}


def load_hf_weights(model: FsdpModel, directory: Path, device: torch.device, adapter: Path | None = None) -> None:
    """Fill every parameter and router bias from a Hugging Face checkpoint. Collective over the world.

    Each rank reads only its rows. An adapter is merged into a value model.

    Raises:
        CheckpointError: missing or unexpected tensors, wrong shapes, damaged files, NaN or infinity; on every rank,
            even if only one found it.
    """

    def open_checked() -> HfCheckpoint:
        checkpoint = ValueModel(directory, adapter) if model.values else HfCheckpoint(directory)
        expected, tied = checkpoint_shapes(model), model.tied_names()
        checkpoint.require(expected, tied)
        if dist.get_rank() == 0 and EMBEDDING in expected:  # only this rank reads more than its part
            checkpoint.require_copies(tied.intersection(HEADS, checkpoint.shapes()), EMBEDDING)
        return checkpoint

    def fill_all() -> None:
        fill(model, model.own_by_name(), checkpoint)
        for name, bias in model.kept_by_name().items():
            bias.copy_(checkpoint.read(name, 0, 0, len(bias)))

    what = f"loading {directory}"
    with together(open_checked, what, device) as checkpoint:
        together(fill_all, what, device)


@torch.no_grad()
def fill(model: FsdpModel, parameters: Mapping[str, Tensor], source: HfCheckpoint | Initial) -> None:
    """Fill this rank's rows of ``parameters``, given by name. Rows that no stored tensor has become 0."""
    for name, parameter in parameters.items():
        shard = shard_of(parameter).zero_()
        for piece in model.pieces(name, shard, rows_of_rank(parameter).start):
            if piece.view.numel():
                piece.view.copy_(source.read(piece.name, 0, piece.start, len(piece.view)))


def export_manifest(
    shapes: Mapping[str, Shape], kept: Mapping[str, Tensor], dtype: torch.dtype, updates: str = MODEL
) -> Manifest | None:
    """Return the tensors that ``export_buckets`` yields on this rank; ``None`` if it yields none."""
    if dist.get_rank() > 0:
        return None
    types = {name: bias.dtype for name, bias in kept.items()}
    described = {name: TensorInfo(dtype_name(types.get(name, dtype)), shape) for name, shape in shapes.items()}
    return Manifest(described, updates)


@torch.no_grad()
def export_buckets(
    tensors: Mapping[str, Tensor],
    rows: Callable[[str], Tensor],
    cut: Callable[[str, Tensor], list[TensorRows]],
    dtype: torch.dtype,
    bucket_bytes: int,
    device: torch.device,
) -> Iterator[WeightBucket]:
    """Stream tensors in ``dtype``, at most ``bucket_bytes`` per bucket. A single larger one gets its own bucket.

    Router biases, which are not sharded, stay in float32: rounding would change the chosen experts.

    Collective over the world: the first rank yields the tensors, the others the same number of empty buckets. Besides
    the bucket, only one parameter is whole at a time; no rank ever holds the model.

    Args:
        tensors: parameters and router biases by name.
        rows: returns this rank's rows to export, such as a parameter's, or its gradient's, by name.
        cut: divides a whole tensor with a name into those to export.
    """
    bucket: list[tuple[str, Tensor]] = []
    nbytes = 0
    for name, tensor in tensors.items():
        kept = not isinstance(tensor, DTensor)
        size = tensor.nbytes if kept else tensor.numel() * dtype.itemsize
        if nbytes and nbytes + size > bucket_bytes:
            yield WeightBucket(bucket)
            bucket, nbytes = [], 0
        whole = tensor.clone() if kept else gather_tensor(rows(name), tensor.shape, dtype, device)
        nbytes += size
        if dist.get_rank() == 0:
            bucket += [(piece.name, piece.view) for piece in cut(name, whole)]
    yield WeightBucket(bucket)
