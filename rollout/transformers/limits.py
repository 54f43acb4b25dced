"""Limits of the transformers engine. This module doesn't import transformers."""

from collections.abc import Iterator
from dataclasses import dataclass

from rollout.limits import OwnLimits
from slime_like.config.rollout import RolloutConfig

_ARGUMENTS = ("attn_implementation", "max_batch_size")


@dataclass(frozen=True, kw_only=True)
class TransformersLimits(OwnLimits):
    """Limits of the transformers engine."""

    def argument_problems(self, rollout: RolloutConfig, is_here: bool) -> Iterator[str]:
        for name in rollout.engine_args_of(self.name):
            if name not in _ARGUMENTS:
                choices = f"use one of: {', '.join(_ARGUMENTS)}"
                yield f"rollout.engine_args.{name} is not an argument of {self.name}; {choices}"
        if rollout.tensor != 1:
            problem = "the transformers engine runs on one device; use 1, or another engine"
            yield f"rollout.tensor={rollout.tensor}: {problem}"
        if rollout.pipeline != 1:
            problem = "it has no stages; use rollout.tensor, or rollout.engine=vllm"
            yield f"rollout.pipeline={rollout.pipeline}: {problem}"

    def quantization_problem(self, on_cuda: bool) -> str | None:
        return None


LIMITS = TransformersLimits(name="transformers", packages=("transformers",), tested="5.19")
