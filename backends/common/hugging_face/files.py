"""Reading of slices from a Hugging Face checkpoint's safetensors files."""

import contextlib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from backends.common.process.agreement import list_by_kind, list_names
from slime_like.config.lora import ADAPTER_CONFIG, LoraConfig
from slime_like.errors import CheckpointError
from slime_like.models.dimensions import HEADS, VALUE_HEAD
from slime_like.models.tower import language_names
from slime_like.models.weight_files import StackPart, WeightFilesError, stack_parts, value_head_of, weight_files
from slime_like.weights.adapter import factor_names, factor_parts, factor_shapes, stored_factors, without_tower

Shape = tuple[int, ...]
Item = TypeVar("Item")

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floating-point types by their safetensors names."""

_COMPARED = 1 << 22
"""Number of tensor elements compared at a time."""


class HfCheckpoint(contextlib.ExitStack):
    """Tensors of one language model, opened for reading. A context manager that closes the files.

    Opening reads only headers; values are read on request. In a checkpoint with a vision tower, the language model's
    tensors have the names of a checkpoint without one. Stacks of experts are read as matrices (see ``stack_parts``).

    Attributes:
        stored: their names in the files.
        kept: tensors of the tower, and of layers for multi-token prediction, by their names in the files.

    Raises:
        CheckpointError: no safetensors file, a listed one missing, one damaged or cut off, or a tensor stored twice.
    """

    _settings = "config.json"

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = Path(directory)
        self._slices: dict[str, Any] = {}
        try:
            for file in _weight_files(self.directory):
                self._open(file)
            own = language_names(self.directory, self._slices)
            self.kept = {name: part for name, part in self._slices.items() if name not in own}
            self._slices = {name: self._slices[name] for name in own}
            parts = stack_parts(self.directory, self.shapes())
            matrices = {name: _Matrix(self._slices[part.stack], part) for name, part in parts.items()}
            for stack in {part.stack for part in parts.values()}:
                del self._slices[stack]
            self._slices |= matrices
        except CheckpointError:
            self.close()
            raise
        own = language_names(self.directory, self._slices)
        self.stored = {name: stored for stored, name in own.items()}
        self._slices = {name: self._slices[stored] for name, stored in self.stored.items()}

    def _open(self, file: Path) -> None:
        try:
            reader = self.enter_context(safe_open(file, framework="pt"))
            names = list(reader.keys())
        except (SafetensorError, OSError) as error:
            problem = f"{file} is damaged ({error}); copy or download it again"
            raise CheckpointError(problem, code="weight-file-damaged") from error
        twice = sorted(self._slices.keys() & set(names))
        if twice:
            raise CheckpointError(
                f"tensors that another file has, too: {list_names(twice)}",
                code="tensor-stored-twice",
                who=str(file),
                remedy="remove one of them",
            )
        self._slices |= {name: reader.get_slice(name) for name in names}

    def require(self, expected: Mapping[str, Shape], ignored: set[str]) -> None:
        """Reject a checkpoint whose tensors are not exactly ``expected``.

        Args:
            ignored: names that may be present but are not used.
        """
        present = {name for name in self._slices if not name.endswith("rotary_emb.inv_freq")} - ignored
        stored = {name: self._slices[name] for name in expected if name in self._slices}
        problems = {
            "missing": sorted(expected.keys() - present),
            "unexpected": sorted(present - expected.keys()),
            "wrong shape": [
                f"{name} is {part.get_shape()}, not {list(expected[name])}"
                for name, part in stored.items()
                if tuple(part.get_shape()) != expected[name]
            ],
            "not of a floating-point type (quantized?)": [
                f"{name} ({part.get_dtype()})" for name, part in stored.items() if part.get_dtype() not in DTYPES
            ],
        }
        if any(problems.values()):
            raise CheckpointError(
                f"the tensors do not fit its {self._settings}; {list_by_kind(problems)}",
                code="tensors-do-not-fit",
                who=str(self.directory),
                remedy=f"use the {self._settings} and the weights of the same, unquantized model",
            )

    def require_copies(self, copies: Collection[str], original: str) -> None:
        """Reject a checkpoint whose tied tensors differ from ``original`` in any bit.

        Its ``config.json`` says that they are one tensor. transformers would use the file, engines the configuration.
        """
        different = sorted(name for name in copies if not self._same(name, original))
        if different:
            raise CheckpointError(
                f"config.json has tie_word_embeddings=true, but {list_names(different)} and {original} are stored and "
                "differ",
                code="tied-tensors-differ",
                who=str(self.directory),
                remedy="set it to false, or remove the tensors that the model does not use",
            )

    def _same(self, one: str, other: str) -> bool:
        """Return whether two tensors have the same bits. Reads a few rows at a time."""
        if (self.dtype(one), self.shapes()[one]) != (self.dtype(other), self.shapes()[other]):
            return False
        rows, columns = self.shapes()[one]
        step = max(1, _COMPARED // columns)
        for start in range(0, rows, step):
            length = min(step, rows - start)
            ours, theirs = (self.read_unchecked(name, 0, start, length).view(torch.uint8) for name in (one, other))
            if not torch.equal(ours, theirs):
                return False
        return True

    def shapes(self) -> dict[str, Shape]:
        """Return name and shape of every stored tensor."""
        return {name: tuple(part.get_shape()) for name, part in self._slices.items()}

    def dtype(self, name: str) -> str:
        """Return a tensor's type by its safetensors name: "BF16", "F32", ..."""
        dtype: str = self._slices[name].get_dtype()
        return dtype

    def use_stored_names(self) -> None:
        """Read the language model under its stored names, and the tower, too."""
        self._slices = {self.stored[name]: part for name, part in self._slices.items()} | self.kept

    def kept_nbytes(self, name: str) -> int:
        """Return the bytes of a tensor in ``kept``."""
        bits = re.search(r"\d+", self.kept[name].get_dtype())
        return math.prod(self.kept[name].get_shape()) * (int(bits[0]) // 8 if bits else 1)

    def read(self, name: str, axis: int, start: int, length: int) -> Tensor:
        """Read ``length`` entries from ``start`` along ``axis`` (0 or 1), in the file's type. Reads nothing else.

        Raises:
            CheckpointError: the range holds NaN or infinity.
        """
        values = self.read_unchecked(name, axis, start, length)
        if is_not_finite(values):
            raise CheckpointError(
                f"{name} holds NaN or infinity",
                code="weights-not-finite",
                who=str(self.directory),
                remedy="use a checkpoint from before it went wrong",
            )
        return values

    def read_unchecked(self, name: str, axis: int, start: int, length: int) -> Tensor:
        """Read like ``read``, but accept any values."""
        part = self._slices[name]
        stop = start + length
        values: Tensor = part[start:stop] if axis == 0 else part[:, start:stop]
        return values

    def read_whole(self, name: str) -> Tensor:
        """Read a tensor of any type and number of axes, with any values."""
        values: Tensor = self._slices[name][...]
        return values


class _Matrix:
    """One expert's matrix, read from a stack like a stored tensor."""

    def __init__(self, stack: Any, part: StackPart) -> None:
        self._stack, self._part = stack, part

    def get_shape(self) -> list[int]:
        return [self._part.rows, self._stack.get_shape()[2]]

    def get_dtype(self) -> str:
        dtype: str = self._stack.get_dtype()
        return dtype

    def __getitem__(self, index: Any) -> Tensor:
        """Return the rows of a slice, the columns of ``[:, slice]``, or everything for an ellipsis."""
        part, (rows, *columns) = self._part, index if isinstance(index, tuple) else (index,)
        start, stop, _ = (slice(None) if rows is ... else rows).indices(part.rows)
        values: Tensor = self._stack[(part.expert, slice(part.start + start, part.start + stop), *columns)]
        return values


class Adapter(HfCheckpoint):
    """The factors of a PEFT adapter under the names of ``factor_names``. They must have the names and shapes
    ``expected``. Factors of a stack of experts are read as those of its matrices."""

    _settings = ADAPTER_CONFIG

    def __init__(self, directory: Path, expected: Mapping[str, Shape]) -> None:
        super().__init__(directory)
        self._slices = {without_tower(name): part for name, part in self._slices.items()}
        self.require(stored_factors(expected, self._slices), set())
        stacks = dict(self._slices)
        for name, part in factor_parts(expected).items():
            if part.stack in stacks:
                blocks = stacks[part.stack][...].view(part.blocks)  # the file's memory, read on access
                self._slices[name], (kind, *_, last) = blocks[part.place], part.place
                if ".lora_B." in name and last == 0 and part.blocks[0] > 1 and blocks[kind, :, 1 - kind].any():
                    problem = f"gate and up projections in {part.stack} share inner rows, which are separate here"
                    remedy = "merge the adapter into its base with PEFT, and train new factors"
                    raise CheckpointError(problem, code="factors-shared", who=str(directory), remedy=remedy)


class ValueModel(HfCheckpoint):
    """A checkpoint read as a value model: without an output projection, and with the head 0 if none is stored. A PEFT
    adapter is merged into it.

    Raises:
        CheckpointError: the head has a bias other than 0.
    """

    def __init__(self, directory: Path, adapter: Path | None = None) -> None:
        super().__init__(directory)
        self._lora = LoraConfig(path=adapter)
        self._factors = {} if adapter is None else factor_shapes(self._lora, self.shapes())
        self._adapter = None if adapter is None else self.enter_context(Adapter(adapter, self._factors))
        head = value_head_of(self._slices) or VALUE_HEAD
        bias = self._slices.pop(f"{head.removesuffix('weight')}bias", None)
        if bias is not None and bool(bias[...].any()):
            raise CheckpointError(
                "its value head has a bias, which the critic's head lacks",
                code="value-head-with-bias",
                who=str(directory),
                remedy="use one without, or remove the head to begin at 0",
            )
        renamed = {VALUE_HEAD if name == head else name: part for name, part in self._slices.items()}
        logits = tuple(name.removesuffix("weight") for name in HEADS)
        self._slices = {name: part for name, part in renamed.items() if not name.startswith(logits)}

    def read_unchecked(self, name: str, axis: int, start: int, length: int) -> Tensor:
        values, (of_a, of_b) = super().read_unchecked(name, axis, start, length), factor_names(name)
        if self._adapter is None or of_a not in self._factors:
            return values
        a, b = (self._adapter.read_whole(each).float() for each in (of_a, of_b))
        a, b = (a, b[start : start + length]) if axis == 0 else (a[:, start : start + length], b)
        return torch.add(values.float(), b @ a, alpha=self._lora.scale).to(values.dtype)

    def require(self, expected: Mapping[str, Shape], ignored: set[str]) -> None:
        self._slices.setdefault(VALUE_HEAD, _Zeros(torch.zeros(expected[VALUE_HEAD])))
        super().require(expected, ignored)


class _Zeros:
    """A tensor of zeros, read like a stored one."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def get_shape(self) -> list[int]:
        return list(self._values.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        return self._values[index]


def is_not_finite(values: Tensor) -> bool:
    """Return whether there is NaN or infinity. The sum costs one pass; only suspicious tensors get a second."""
    return not bool(values.sum().isfinite()) and not bool(values.isfinite().all())


def _weight_files(directory: Path) -> list[Path]:
    try:
        files = weight_files(directory)
    except WeightFilesError as error:
        raise CheckpointError(str(error), code="weight-files") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        problem = f"files that its index lists are missing: {list_names(missing)}"
        raise CheckpointError(problem, code="weight-files-missing", who=str(directory))
    return files


def in_files(items: Sequence[Item], nbytes: Callable[[Item], int], max_bytes: int) -> list[list[Item]]:
    """Group consecutive items into files of at most ``max_bytes``; a larger item gets a file of its own."""
    files: list[list[Item]] = []
    room = 0
    for item in items:
        if not files or nbytes(item) > room:
            files.append([])
            room = max_bytes
        files[-1].append(item)
        room -= nbytes(item)
    return files
