"""Check from the files' headers, without torch, that a Hugging Face checkpoint's weights are complete."""

import json
import re
import zlib
from collections.abc import Container, Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from slime_like.models.dimensions import VALUE_HEAD, ModelDimensions
from slime_like.models.tower import language_names

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_AGAIN = "copy or download it again"

_LAYER = re.compile(r"\D*?\.(\d+)\.")
"""The first number in a name is the layer's index: model.layers.3., transformer.h.3., gpt_neox.layers.3."""


_STACK = re.compile(r"(?P<experts>.*\.mlp\.experts)\.gate_up_proj")


class StackPart(NamedTuple):
    """One expert's matrix: ``rows`` rows from ``start`` of entry ``expert`` of the stored tensor ``stack``."""

    stack: str
    expert: int
    start: int
    rows: int


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
        stored = (name for file in files for name in _shapes(file))
        names = language_names(directory, stored).values()
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

    Stacks of experts are listed as matrices (see ``stack_parts``).

    Raises:
        WeightFilesError: a file is missing or damaged.
    """
    shapes = stored_shapes(directory)
    parts = stack_parts(directory, shapes)
    matrices = {name: (part.rows, shapes[part.stack][2]) for name, part in parts.items()}
    stacks = {part.stack for part in parts.values()}
    return {name: shape for name, shape in shapes.items() if name not in stacks} | matrices


def stored_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the same with stacks as they are stored."""
    return {name: shape for file in weight_files(directory) for name, shape in _shapes(file).items()}


def stored_stacks(directory: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, StackPart]]:
    """Return ``stored_shapes`` and their ``stack_parts``; both are empty without weights."""
    shapes = stored_shapes(directory) if any(directory.glob("*.safetensors")) else {}
    return shapes, stack_parts(directory, shapes)


def stack_parts(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StackPart]:
    """Return the matrices of experts that are stored in stacks, by the names that they have in other checkpoints.

    Some checkpoints (Qwen3.5's) have two stacks in each layer, like transformers' modules: (E, 2I, H), with the gate's
    rows above the up projection's, and (E, H, I). Stacks of transposed matrices, and of families that always store
    stacks, are not listed.
    """
    found = {}
    for name, shape in shapes.items():
        if match := _STACK.fullmatch(name):
            down = f"{match['experts']}.down_proj"
            experts, rows, width = shape if len(shape) == 3 else (0, 0, 0)
            if experts and shapes.get(down) == (experts, width, rows // 2):
                half = rows // 2
                kinds = {"gate": (name, 0, half), "up": (name, half, half), "down": (down, 0, width)}
                for kind, (stack, start, count) in kinds.items():
                    for expert in range(experts):
                        matrix = f"{match['experts']}.{expert}.{kind}_proj.weight"
                        found[matrix] = StackPart(stack, expert, start, count)
    return {} if not found or ModelDimensions.from_checkpoint(directory).attention.unsupported else found


def is_router_bias(name: str) -> bool:
    return name.endswith((".e_score_correction_bias", ".expert_bias"))


def keeps_type(name: str) -> bool:
    """Return whether the Hugging Face tensor is not trained, and keeps its type: rounding a router's bias would change
    its choices. Gemma 4 multiplies each layer's output with a scalar."""
    return is_router_bias(name) or name.endswith(".layer_scalar")


def model_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of a model, by its stored name. Leaves out a vision tower, and stored tensors
    that are not separate weights (``ModelDimensions.is_ignored``). Raises like ``header_shapes`` and
    ``ModelDimensions.from_checkpoint``."""
    shapes = header_shapes(directory)
    dimensions = ModelDimensions.from_checkpoint(directory)
    return {
        name: shapes[name] for name, own in language_names(directory, shapes).items() if not dimensions.is_ignored(own)
    }


def value_head_of(names: Container[str]) -> str | None:
    """Return the name of a value head's weight among a model's tensors; ``None`` if it has none."""
    return next((name for name in (VALUE_HEAD, "v_head.summary.weight") if name in names), None)


def fingerprint(directory: Path) -> int | None:
    """Return a CRC-32 of samples of the weight files, the same for a copy; ``None`` if they cannot be read."""
    crc = 0
    try:
        for file in weight_files(directory):
            with file.open("rb") as stream:
                for place in range(0, file.stat().st_size, file.stat().st_size // 16 + 1):
                    stream.seek(place)
                    crc = zlib.crc32(stream.read(1 << 14), crc)
    except (WeightFilesError, OSError):
        return None
    return crc


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
        if not files and (other := next(directory.glob("pytorch_model*.bin"), None)):
            remedy = "save them again with transformers, AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            raise WeightFilesError(f"{other}: weights are read from *.safetensors files only; {remedy}")
        if not files:
            raise _damaged(f"{directory} contains no *.safetensors file, so the model has no weights")
        return files
    names = _listed_files(index)
    if single.is_file() and SINGLE not in names:
        raise WeightFilesError(
            f"{directory} contains {SINGLE}, but {INDEX} does not list it: there may be two models; remove the one "
            "that you do not want"
        )
    return [directory / name for name in names]


def _listed_files(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not all(isinstance(name, str) for name in names):
            raise ValueError("a file name is not a string")
    except OSError as error:
        raise _damaged(error) from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise _damaged(f"{index} is not an index of safetensors files ({error})") from error
    return names


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Read the tensors' shapes by name. safetensors checks that the file's length matches its header."""
    try:
        with safe_open(file, framework="numpy") as reader:
            return {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _damaged(f"{file} is damaged ({error})") from error
