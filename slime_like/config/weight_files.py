"""Are a Hugging Face checkpoint's weights there, and whole? Told from file sizes and headers, without torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from slime_like.config.dimensions import ModelDimensions

INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000
"""The format's own bound on the header, in bytes."""

_LAYER = re.compile(r"\D*?\.(\d+)\.")
"""The first number in a name is the layer's: model.layers.3., transformer.h.3., gpt_neox.layers.3."""


class _DamagedError(Exception):
    """Half a sentence about one file."""


def weight_file_problems(directory: Path, dimensions: ModelDimensions) -> list[str]:
    """What is wrong with the safetensors files of ``directory``, each a sentence with its remedy.

    Names, shapes and values are compared when they are loaded; here a file that is missing or cut off is found, and a
    ``config.json`` that speaks of another number of layers than is stored.
    """
    try:
        files = _files(directory)
        missing = [file for file in files if not file.is_file()]
        if missing:
            return [f"{file} is missing, though {INDEX} lists it; copy or download it again" for file in missing]
        names = [name for file in files for name in _header(file) if not dimensions.is_draft(name)]
    except (_DamagedError, OSError) as error:
        return [f"{error}; copy or download it again"]
    layers = {int(found[1]) for found in map(_LAYER.match, names) if found}
    if len(layers) != dimensions.num_layers:
        return [
            f"{directory}/config.json says num_hidden_layers={dimensions.num_layers}, but the weights beside it are of "
            f"{len(layers)} layers; use the config.json and the weights of the same model"
        ]
    return []


def header_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in the safetensors files of ``directory``, from their headers.

    Raises:
        OSError, ValueError: a file is missing or damaged; ``weight_file_problems`` says which.
    """
    try:
        headers = [_header(file) for file in _files(directory)]
    except _DamagedError as error:
        raise ValueError(str(error)) from error
    return {
        name: tuple(entry["shape"]) for header in headers for name, entry in header.items() if name != "__metadata__"
    }


def _files(directory: Path) -> list[Path]:
    """The files of the index where there is one, else every safetensors file."""
    index = directory / INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return [directory / name for name in sorted(names)]
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise _DamagedError(f"{index} is no index of safetensors files ({error})") from error
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise _DamagedError(f"{directory} holds no *.safetensors file, so the model has no weights")
    return files


def _header(file: Path) -> dict[str, Any]:
    """The header: names, types, shapes, places. The file must be exactly as long as it says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER):
            raise _DamagedError(f"{file} is cut off or no safetensors file: its header does not fit its {size} bytes")
        text = stream.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        expected = _LENGTH_BYTES + length + int(end)
    except (ValueError, KeyError, IndexError, AttributeError, TypeError, RecursionError) as error:
        raise _DamagedError(f"{file} is no safetensors file: its header cannot be read ({error})") from error
    if size != expected:
        raise _DamagedError(f"{file} has {size} bytes, but its header tells of {expected}: it is cut off or damaged")
    return header
