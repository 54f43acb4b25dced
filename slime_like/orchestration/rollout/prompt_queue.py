"""Prompts to issue, and their requests. Prompts restored from a checkpoint come first."""

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from slime_like.config import RunConfig
from slime_like.data.prompts import Prompt, PromptSource
from slime_like.interfaces import GenerationRequest, PromptInput
from slime_like.orchestration.rollout.advantages import configured_estimator
from slime_like.orchestration.rollout.requests import build_requests, training_sampling


class PromptQueue:
    """Queue of a run's training prompts. Not thread-safe.

    Attributes:
        source: prompts that were never issued.
    """

    def __init__(self, config: RunConfig, source: PromptSource) -> None:
        self.source = source
        self._restored: deque[Prompt] = deque()
        self._requests = partial(
            build_requests,
            sampling=training_sampling(config.rollout, config.model),
            num_samples=config.rollout.samples_per_prompt,
            seed=config.seed,
            label="train",
            greedy="greedy" in configured_estimator(config.algorithm.advantage.name).needs,
        )

    def take(self, count: int) -> tuple[list[tuple[Prompt, GenerationRequest]], int]:
        """Return the next ``count`` prompts with their requests, and how many of them, the first ones, are restored."""
        restored = [self._restored.popleft() for _ in range(min(count, len(self._restored)))]
        prompts = [*restored, *self.source.next(count - len(restored))]
        return list(zip(prompts, self._requests(prompts), strict=True)), len(restored)

    def state_dict(self, unfinished: Iterable[Prompt]) -> dict[str, Any]:
        """Return the position, and the prompts that were issued but not trained, for JSON.

        Args:
            unfinished: prompts that were taken.
        """
        prompts = sorted([*self._restored, *unfinished], key=lambda prompt: prompt.group_id)
        return {"data": self.source.state_dict(), "in_flight": [_fields(prompt) for prompt in prompts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state["data"])
        self._restored = deque(_prompt(fields) for fields in state.get("in_flight", ()))


def _fields(prompt: Prompt) -> dict[str, Any]:
    """Convert a prompt for JSON, without unset fields of agents, demonstrated conversations and inputs."""
    arrays = {name: (str(each.dtype), each.tolist()) for name, each in prompt.input.fields.items()}
    fields = asdict(prompt) | {"tokens": list(prompt.input.token_ids), "inputs": arrays or None}
    del fields["input"]
    optional = ("messages", "spans", "forks", "whole_row", "inputs", "source")
    return {name: value for name, value in fields.items() if name not in optional or value is not None}


def _prompt(fields: dict[str, Any]) -> Prompt:
    """Build a prompt without a demonstration from JSON."""
    others = {name: value for name, value in fields.items() if name not in ("tokens", "inputs")}
    arrays = {name: np.array(values, dtype) for name, (dtype, values) in fields.get("inputs", {}).items()}
    return Prompt(PromptInput(fields["tokens"], arrays), **others)
