"""Choice of the attention for ``trainer.attention``, and its requirements."""

from importlib.util import find_spec
from typing import Literal

from slime_like.algorithms.context import Layout
from slime_like.checks.packages import attention_problems
from slime_like.config import RunConfig, TrainerConfig
from slime_like.models.dimensions import ModelDimensions

Attention = Literal["transformer_engine", "ring_flash_attn", "ring", "allgather"]


def attention_of(trainer: TrainerConfig, dimensions: ModelDimensions, on_cuda: bool) -> Attention:
    """Return the configured attention; ``auto`` is Transformer Engine where it can run, and the ring elsewhere."""
    if trainer.attention != "auto":
        return trainer.attention
    can_run = on_cuda and dimensions.latent is None and find_spec("transformer_engine") is not None
    return "transformer_engine" if can_run else "ring"


def context_layout_of(attention: Attention) -> Layout:
    """How a pack is cut for it: zigzag for rings (Transformer Engine's is one), contiguous where keys are gathered."""
    return "contiguous" if attention in ("allgather", "ring_flash_attn") else "zigzag"


def machine_problems(config: RunConfig, on_cuda: bool) -> list[str]:
    """Why this rank's machine cannot run what was asked for, each with a remedy."""
    problems, attention = list(attention_problems(config)), config.trainer.attention
    if attention == "transformer_engine" and not on_cuda:
        problems.append(
            "trainer.attention=transformer_engine needs a CUDA device, and there is none; use trainer.attention=auto, "
            "which is Transformer Engine where it can run"
        )
    if attention == "ring_flash_attn" and on_cuda and find_spec("flash_attn") is None:
        problems.append(
            "trainer.attention=ring_flash_attn needs the package flash_attn on CUDA, which is not installed; "
            "pip install flash-attn, or use trainer.attention=ring or allgather"
        )
    return problems
