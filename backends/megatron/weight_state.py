"""A model's weights as Megatron's sharded state, under the names that every layer spec shares, and back."""

from collections.abc import Iterator
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from slime_like.errors import CheckpointError

EXTRA_STATE = "_extra_state"
"""Ends the keys of what modules of Transformer Engine keep beside weights: scales of 8-bit training, which is not done
here. Local modules have none to write, and could not read any."""


EXPERT_BIAS = "expert_bias"
"""The one weight that is no parameter: float32 whatever the model's type, without a gradient."""


def named_weights(chunk: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """All that a checkpoint holds of a chunk: parameters, and the buffers that are weights."""
    yield from chunk.named_parameters()
    yield from ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(f".{EXPERT_BIAS}"))


def sharded_weights(chunk: GPTModel, metadata: dict[str, Any]) -> dict[str, Any]:
    """Weights alone. Keys of the dictionary are the modules', those inside its values the canonical ones."""
    state: dict[str, Any] = chunk.sharded_state_dict(metadata=metadata)
    return {key: value for key, value in state.items() if not key.endswith(EXTRA_STATE)}


def fill_weights(chunk: GPTModel, state: dict[str, Any]) -> None:
    """Copy what was loaded for ``sharded_weights`` into the parameters.

    Raises:
        CheckpointError: a parameter would stay as it is, or a tensor has no parameter.
    """
    missing, unexpected = chunk.load_state_dict(state, strict=False)
    differing = sorted({key for key in missing if not key.endswith(EXTRA_STATE)} | set(unexpected))
    if differing:
        raise CheckpointError(
            f"the checkpoint and the model do not name the same parameters: {differing[:3]}",
            code="checkpoint-of-another-model",
            remedy="use the model.path that wrote it",
        )
