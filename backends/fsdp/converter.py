"""Converter of ``slime-like convert`` for this backend."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from backends.common.hugging_face.converter import HuggingFaceConverter
from backends.fsdp.checkpoint import MODEL, StoredCheckpoint
from backends.fsdp.model import meta_model
from backends.fsdp.names import TensorRows, pieces
from backends.fsdp.weights import checkpoint_shapes
from slime_like.errors import ConfigError
from slime_like.interfaces.conversion import ConversionOptions, ConversionSummary, Report, TensorInfo, TensorSource


class FsdpConverter(HuggingFaceConverter):
    """See ``slime_like.interfaces.conversion.Converter``."""

    def prove(self) -> dict[str, tuple[int, ...]]:
        """Return the model's parameters as the tensors: nothing is split or rearranged."""
        return checkpoint_shapes(meta_model(self.model, torch.float32))

    def to_checkpoint(self, output: Path, options: ConversionOptions, report: Report) -> ConversionSummary:
        """Raise ConfigError: there is nothing to convert to."""
        raise ConfigError(
            "trainer.backend=fsdp reads Hugging Face checkpoints directly; give the directory as model.path"
        )

    def _open(self, checkpoint: Path) -> TensorSource:
        return FsdpSource(
            checkpoint, meta_model(self.model, torch.float32).pieces if self.model.lora.is_set else pieces
        )


class FsdpSource:
    """A training checkpoint of this backend. Tensors of one parameter are read together.

    Weights are stored as float32, whatever type they were computed with. ``cut`` divides a parameter into tensors.
    """

    def __init__(self, checkpoint: Path, cut: Callable[[str, Tensor], list[TensorRows]]) -> None:
        self._cut = cut
        self._checkpoint = StoredCheckpoint(checkpoint)
        self._checkpoint.checksums.verify_lengths()
        self._parameters: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.groups: list[list[str]] = []
        for stored, shape in self._checkpoint.shapes.items():
            if stored.startswith(MODEL):
                parts = cut(stored.removeprefix(MODEL), torch.empty(shape, device="meta"))
                shapes = {piece.name: tuple(piece.view.shape) for piece in parts}
                dtype = str(self._checkpoint.dtypes[stored]).removeprefix("torch.")
                self.tensors |= {name: TensorInfo(dtype, shape) for name, shape in shapes.items()}
                self.groups.append(list(shapes))
                self._parameters[next(iter(shapes))] = stored

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Read tensors. ``names`` must be one of ``groups``."""
        stored = self._parameters[names[0]]
        values = torch.empty(self._checkpoint.shapes[stored], dtype=self._checkpoint.dtypes[stored])
        self._checkpoint.read({stored: values}, alone=True)
        return {piece.name: piece.view for piece in self._cut(stored.removeprefix(MODEL), values)}
