"""Low-rank factors in a transformers model, applied by hooks on its linear layers."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from rollout.adapter import taken
from slime_like.weights.adapter import PREFIX


def serve(engine: Any, settings: dict[str, Any], *source: Any) -> None:
    factors, scale = taken(engine.receiver, *source), settings["lora_alpha"] / settings["r"]
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
