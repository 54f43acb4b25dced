"""Samples of a request that take several turns: run beside each other, each turn with another seed."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from slime_like.errors import EngineError
from slime_like.interfaces import Generation, GenerationRequest

Generate = Callable[[GenerationRequest], Awaitable[list[Generation]]]
"""An engine's ``generate``."""


def turn_seed(seed: int, sample: int, turn: int, repeat: int = 0) -> int:
    """A seed for every turn of every sample, so that a repeated rollout is the same, in whatever order calls arrive."""
    return int(np.random.SeedSequence([seed, sample, turn, *([repeat] if repeat else [])]).generate_state(1)[0])


async def all_or_none(coroutines: Sequence[Coroutine[Any, Any, Generation]]) -> list[Generation]:
    """Gather all results in order; a failure or cancellation cancels the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def duplicate_request(request_id: str) -> EngineError:
    """The error for a request whose samples are running already."""
    return EngineError(
        f"request {request_id} is already running", code="duplicate-request", remedy="ids must be unique"
    )
