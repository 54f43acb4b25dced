"""Weights of a loaded transformers model: the location of Hugging Face tensors, and low-rank factors."""

import re
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from rollout.weight_update import take_factors
from slime_like.errors import WeightSyncError
from slime_like.weights.adapter import PREFIX

_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj\.weight")


def destinations(model: Any) -> dict[str, Tensor]:
    """Return parameters and buffers by name. They may be written to."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def destination(name: str, tensors: dict[str, Tensor]) -> Tensor:
    """Return the tensor, or the part of a fused one, for checkpoint tensor ``name``.

    transformers fuses a layer's experts into ``gate_up_proj`` (experts, 2 * intermediate, hidden), with gates first,
    and ``down_proj`` (experts, hidden, intermediate). Checkpoints store them separately.
    """
    if name in tensors:
        return tensors[name].data
    match = _EXPERT.fullmatch(name)
    fused = match and tensors.get(f"{match['experts']}.{'down_proj' if match['part'] == 'down' else 'gate_up_proj'}")
    if match is None or fused is None:
        raise WeightSyncError(f"the transformers model has no place for tensor {name}", code="unknown-tensor")
    expert = fused.data[int(match["index"])]
    half = expert.shape[0] // 2
    return {"gate": expert[:half], "up": expert[half:], "down": expert}[match["part"]]


def serve_adapter(engine: Any, settings: dict[str, Any], *source: Any) -> None:
    """Replace the adapter by factors from ``source``. Hooks on the linear layers apply it."""
    factors, scale = take_factors(engine.receiver, *source), settings["lora_alpha"] / settings["r"]
    for name in factors:
        stem, is_a, _ = name.partition(".lora_A.")
        if is_a:
            layer = engine.model.get_submodule(stem.removeprefix(PREFIX))
            if not hasattr(layer, "factors"):
                layer.register_forward_hook(_add_product)
            layer.factors = scale, *(factors[f"{stem}.lora_{one}.weight"].to(layer.weight) for one in "AB")


def _add_product(layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    scale, a, b = layer.factors
    return output + scale * F.linear(F.linear(inputs[0], a), b)
