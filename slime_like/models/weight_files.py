"""Check from file sizes and headers, without torch, that a Hugging Face checkpoint's weights are complete."""

import json
import re
from pathlib import Path
from typing import Any

from slime_like.models.dimensions import ModelDimensions

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_AGAIN = "copy or download it again"
_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000
"""The format's limit on the header, in bytes."""

_SHOWN = 5

_LAYER = re.compile(r"\D*?\.(\d+)\.")
"""The first number in a name is the layer's index: model.layers.3., transformer.h.3., gpt_neox.layers.3."""


class WeightFilesError(ValueError):
    """A sentence about one file, or about which files count, with its remedy."""


def _damaged(problem: object) -> WeightFilesError:
    return WeightFilesError(f"{problem}; {_AGAIN}")


def weight_file_problems(directory: Path, dimensions: ModelDimensions) -> list[str]:
    """List problems of the safetensors files of ``directory``, each with its remedy.

    Finds files that are missing or cut off, and a ``config.json`` with another number of layers than is stored. Names,
    shapes and values are compared on loading.
    """
    try:
        files = weight_files(directory)
        missing = [file for file in files if not file.is_file()]
        if missing:
            return [f"{file} is missing, though {INDEX} lists it; {_AGAIN}" for file in missing]
        names = [name for file in files for name in _header(file) if not dimensions.is_draft(name)]
    except WeightFilesError as error:
        return [str(error)]
    layers = {int(found[1]) for found in map(_LAYER.match, names) if found}
    if len(layers) != dimensions.num_layers:
        return [
            f"{directory}/config.json has num_hidden_layers={dimensions.num_layers}, but its weights have "
            f"{len(layers)} layers; use the config.json and the weights of the same model"
        ]
    return []


def header_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in the safetensors files of ``directory``, from their headers.

    Raises:
        WeightFilesError: a file is missing or damaged.
    """
    headers = map(_header, weight_files(directory))
    return {name: tuple(entry["shape"]) for header in headers for name, entry in header.items()}


def weight_files(directory: Path) -> list[Path]:
    """List the model's safetensors files: the index's, else ``model.safetensors``, else all.

    Other files may exist: some publishers add the same weights under other names (``consolidated.safetensors``).

    Raises:
        WeightFilesError: no file, an unreadable index, or an index that does not list an existing
            ``model.safetensors``: transformers would read one, vLLM the other.
    """
    index, single = directory / INDEX, directory / SINGLE
    if not index.is_file():
        files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
        if not files:
            raise _damaged(f"{directory} holds no *.safetensors file, so the model has no weights")
        return files
    names = _listed_files(index)
    if single.is_file() and SINGLE not in names:
        raise WeightFilesError(
            f"{directory} holds {SINGLE} and an {INDEX} that does not list it, two models perhaps; remove the "
            "one that you do not mean"
        )
    return [directory / name for name in names]


def _listed_files(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not all(isinstance(name, str) for name in names):
            raise ValueError("a name in it is not text")
    except OSError as error:
        raise _damaged(error) from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise _damaged(f"{index} is not an index of safetensors files ({error})") from error
    return names


def file_problem(file: Path) -> str | None:
    """Describe the problem of one file and its remedy, from its length and header."""
    try:
        _header(file)
    except WeightFilesError as error:
        return str(error)
    return None


def _header(file: Path) -> dict[str, Any]:
    """Read the tensors' types, shapes and positions by name. The file's length must match its header."""
    try:
        size = file.stat().st_size
        length, header = _read_header(file, size)
    except OSError as error:
        raise _damaged(error) from error
    there = size - _LENGTH_BYTES - length
    expected = max(map(_end, header.values()), default=0)
    if there != expected:
        lost = sorted((name for name in header if _end(header[name]) > there), key=lambda name: _end(header[name]))
        lacks = f", and lacks {', '.join(lost[:_SHOWN])}{', ...' if len(lost) > _SHOWN else ''}" if lost else ""
        raise _damaged(
            f"{file} has {size} bytes, but its header describes {size - there + expected}: it is "
            f"{'cut off' if there < expected else 'too long'} or damaged{lacks}"
        )
    return header


def _read_header(file: Path, size: int) -> tuple[int, dict[str, Any]]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER):
            raise _damaged(f"{file} is cut off or no safetensors file: its header does not fit its {size} bytes")
        text = stream.read(length)
    try:
        header = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        for entry in header.values():
            _end(entry)
    except (ValueError, KeyError, IndexError, AttributeError, TypeError, RecursionError) as error:
        raise _damaged(f"{file} is not a safetensors file: its header cannot be read ({error})") from error
    return length, header


def _end(entry: dict[str, Any]) -> int:
    return int(entry["data_offsets"][1])
