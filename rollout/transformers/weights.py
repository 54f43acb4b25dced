"""Weights of a loaded transformers model: the location of Hugging Face tensors, and low-rank factors."""

import re
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from rollout.weight_update import take_factors
from slime_like.errors import WeightSyncError
from slime_like.models.weight_files import keeps_type
from slime_like.weights.adapter import PREFIX

_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<part>\w+)\.weight")
_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def destinations(model: Any) -> dict[str, Tensor]:
    """Return parameters and buffers, which may be written to, by their names in modules, and also by those in
    checkpoints where transformers stores one under another name."""
    from transformers.core_model_loading import revert_weight_conversion

    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    named = dict[str, Tensor]()
    for name, tensor in found.items():
        stored = revert_weight_conversion(model, {name: tensor})
        if [each.shape for each in stored.values()] == [tensor.shape]:
            named |= dict.fromkeys(stored, tensor)
    return named | found


def keep_router_biases(model: Any) -> None:
    """Hold the routers' biases in float32, in which updates bring them, also where transformers rounds them."""
    for name, tensor in destinations(model).items():
        if keeps_type(name):
            tensor.data = tensor.data.float()


def destination(name: str, tensors: dict[str, Tensor]) -> Tensor:
    """Return the tensor, or the part of a fused one, for checkpoint tensor ``name``.

    transformers fuses a layer's experts into ``gate_up_proj`` (experts, 2 * intermediate, hidden), with gates first,
    and ``down_proj`` (experts, hidden, intermediate). Checkpoints store them separately, some under Mixtral's names.
    """
    if name in tensors:
        return tensors[name].data
    match = _EXPERT.fullmatch(name)
    part = match and _PARTS.get(match["part"])
    experts = match and match["experts"].replace(".block_sparse_moe.", ".mlp.")
    fused = tensors.get(f"{experts}.{'down_proj' if part == 'down' else 'gate_up_proj'}")
    if match is None or part is None or fused is None:
        raise WeightSyncError(f"the transformers model has no place for tensor {name}", code="unknown-tensor")
    expert = fused.data[int(match["index"])]
    half = expert.shape[0] // 2
    return {"gate": expert[:half], "up": expert[half:], "down": expert}[part]


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
