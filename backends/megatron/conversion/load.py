"""Loading of a Hugging Face checkpoint into this rank's model chunks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from backends.common.hugging_face.files import HfCheckpoint, ValueModel
from backends.common.process.agreement import listed, together
from backends.megatron.conversion.placement import PlacedParameter, place_parameters
from backends.megatron.families import family_of
from slime_like.errors import CheckpointError
from slime_like.models.dimensions import EMBEDDING, HEADS, ModelDimensions


def load_hf_weights(
    model_chunks: Sequence[GPTModel], hf_dir: Path, dimensions: ModelDimensions, adapter: Path | None = None
) -> None:
    """Fill every parameter of ``model_chunks`` from ``hf_dir``, cast to the parameter's type.

    Collective over the world. A rank reads only its slices, one at a time. Every parameter element is written once
    (vocabulary padding with zero), and every tensor of the checkpoint is used by some rank.

    Raises:
        CheckpointError: missing or unexpected tensors, wrong shapes, damaged files, NaN, or parameters without a
            source; on every rank, even if only one found it.
    """
    device = next(model_chunks[0].parameters()).device
    what = f"loading {hf_dir}"
    placements = together(lambda: place_parameters(model_chunks, dimensions), what, device)
    _require_all_used(placements, dimensions, device)
    first = dist.get_rank() == 0  # only this rank reads more than its part
    with together(lambda: open_checked(hf_dir, dimensions, first, adapter), what, device) as checkpoint:
        together(lambda: fill(placements, checkpoint), what, device)


def open_checked(
    hf_dir: Path, dimensions: ModelDimensions, compares_copies: bool, adapter: Path | None = None
) -> HfCheckpoint:
    """Open a checkpoint that must have exactly the model's tensors. Comparing copies reads whole tensors. An adapter is
    merged into a value model."""
    checkpoint = ValueModel(hf_dir, adapter) if dimensions.values else HfCheckpoint(hf_dir)
    ignored = {name for name in checkpoint.shapes() if dimensions.is_ignored(name)}
    checkpoint.require(family_of(dimensions).hf_shapes(dimensions), ignored)
    if compares_copies:
        checkpoint.require_copies(ignored.intersection(HEADS), EMBEDDING)
    return checkpoint


def _require_all_used(placements: Sequence[PlacedParameter], dimensions: ModelDimensions, device: torch.device) -> None:
    """Require a place on some rank for every Hugging Face tensor of the model. Collective."""
    names = sorted(family_of(dimensions).hf_shapes(dimensions))
    sources = {name for placement in placements for name in placement.source_names()}
    used = torch.tensor([name in sources for name in names], dtype=torch.uint8, device=device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    unused = [name for name, mark in zip(names, used.tolist(), strict=True) if not mark]
    if unused:
        raise CheckpointError(
            f"no parameter of any rank takes {listed(unused)}",
            code="model-differs-from-config",
            remedy="the model was built without the modules they belong to",
        )


class Source(Protocol):
    """Tensors by Hugging Face name."""

    def read(self, name: str, axis: int, start: int, length: int) -> Tensor:
        """Return ``length`` entries from ``start`` along ``axis``."""


@torch.no_grad()
def fill(placements: Sequence[PlacedParameter], source: Source) -> None:
    """Fill parameters, one slice at a time."""
    for placement in placements:
        target, names = placement.parameter.data, placement.source_names()
        if placement.rule.transform.pads:
            target.zero_()
        for piece in placement.pieces():
            values = source.read(names[piece.source], piece.axis, piece.start, piece.length)
            view = piece.view(target)
            view.copy_(values.view(view.shape))
