"""Location of Hugging Face tensors in a loaded transformers model."""

import re
from typing import Any

from torch import Tensor

from slime_like.errors import WeightSyncError

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
