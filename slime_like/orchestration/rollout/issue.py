"""Issue of prompt groups: the staleness bound says how many, and a queue says which."""

import math
from bisect import bisect_left
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


class StalenessGate:
    """Arithmetic of ``rollout.max_staleness``. Holds only numbers. Not thread-safe.

    Before step n, the engines serve version n - 1. Until version v is served, ``v + max_staleness + 1`` batches may be
    issued, without dropped groups, and no more than the run has steps. So the groups of one version always fit into the
    batches that may train on them. A batch takes the oldest ready groups, but waits while the groups left behind could
    not all be trained in time. No group is dropped for its age.

    Args:
        oversample: groups issued per trained group; above 1, groups that a batch leaves behind are dropped.

    Attributes:
        version: weight version that the engines serve.
        formed: last step with a complete batch.
        taken: number of groups in the batch that is being formed.
    """

    def __init__(self, batch_size: int, max_staleness: int, steps: int, oversample: float = 1.0) -> None:
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._steps = steps
        self._oversample = oversample
        self.version = self.formed = self.taken = 0

    @property
    def room(self) -> int:
        """Number of groups that the batch still needs."""
        return self._batch_size - self.taken

    def serve(self, version: int) -> None:
        """Record that the engines serve ``version``: training has completed that many steps."""
        self.version = version
        self.formed = max(self.formed, version)

    def may_issue(self, held: int) -> int:
        """Return how many more groups may be issued, while ``held`` are issued and not taken."""
        batches = min(self.version + self._max_staleness + 1, self._steps) - self.formed
        allowed = math.ceil(batches * self._batch_size * self._oversample)
        return max(0, allowed - held - self.taken)

    def may_take(self, ready: Iterable[int], under_way: Iterable[int]) -> int:
        """Return how many ready groups, oldest first, the batch may take: all it has room for, if the groups left
        behind can still be trained in time.

        Args:
            ready, under_way: versions of the ready groups, and of the groups that will be.
        """
        oldest_first = sorted(ready)
        most = min(self.room, len(oldest_first))
        if self._oversample > 1:
            return most
        later = list(under_way)
        # If n groups may be taken, so may n - 1: the remaining groups only move to earlier places.
        return bisect_left(range(1, most + 1), True, key=lambda n: self._is_late([*oldest_first[n:], *later], n))

    def _is_late(self, left: list[int], count: int) -> bool:
        """Return whether a version in ``left`` is trained too late after ``count`` more groups."""
        first = self.taken + count
        steps = (self.formed + 1 + place // self._batch_size for place in range(first, first + len(left)))
        return any(step > version + self._max_staleness + 1 for step, version in zip(steps, sorted(left), strict=True))

    def take(self, count: int) -> None:
        """Add ``count`` groups to the batch, at most ``room``. A full batch is complete."""
        self.taken += count
        if self.taken == self._batch_size:
            self.formed, self.taken = self.formed + 1, 0


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
