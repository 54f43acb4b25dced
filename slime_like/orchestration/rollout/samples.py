"""Samples that take several turns. They run concurrently, and each turn has a different seed."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from slime_like.errors import EngineError
from slime_like.interfaces import Generation, GenerationRequest

Generate = Callable[[GenerationRequest], Awaitable[list[Generation]]]
"""Type of an engine's ``generate``."""


def turn_seed(seed: int, sample: int, turn: int, repeat: int = 0) -> int:
    """Derive a seed per turn and sample, so a repeated rollout is the same in whatever order calls arrive."""
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
    """Build the error for a request that is already running."""
    return EngineError(
        f"request {request_id} is already running", code="duplicate-request", remedy="ids must be unique"
    )
