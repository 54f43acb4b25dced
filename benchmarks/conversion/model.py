"""Make a checkpoint of a given size, tensor by tensor."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from backends.megatron.families import family_of
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.weight_files import INDEX

_WIDE = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 32000,
}
_FILE_BYTES = 500_000_000


def make_checkpoint(directory: Path, nbytes: int) -> int:
    """Write a random bfloat16 model with Qwen3-1.7B's widths and layers up to ``nbytes``; return its bytes."""
    make_tiny_model(directory, "qwen3")
    (directory / "model.safetensors").unlink()
    config = json.loads((directory / "config.json").read_text(encoding="utf-8")) | _WIDE | {"dtype": "bfloat16"}
    config.pop("layer_types", None)
    one, two = (_numel(directory, config, layers) for layers in (1, 2))
    layers = max(1, round((nbytes / 2 - one) / (two - one)) + 1)
    _numel(directory, config, layers)
    return _write(directory, ModelDimensions.from_checkpoint(directory))


def _numel(directory: Path, config: dict[str, object], layers: int) -> int:
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}), encoding="utf-8")
    dimensions = ModelDimensions.from_checkpoint(directory)
    return sum(torch.Size(shape).numel() for shape in family_of(dimensions).hf_shapes(dimensions).values())


def _write(directory: Path, dimensions: ModelDimensions) -> int:
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    files = total = 0

    def flush() -> None:
        nonlocal files
        files += 1
        name = f"model-{files:05d}.safetensors"
        save_file(tensors, directory / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
        tensors.clear()

    for name, shape in family_of(dimensions).hf_shapes(dimensions).items():
        tensors[name] = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        total += tensors[name].nbytes
        if sum(tensor.nbytes for tensor in tensors.values()) > _FILE_BYTES:
            flush()
    if tensors:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return total
