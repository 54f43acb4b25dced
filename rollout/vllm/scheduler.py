"""Scheduler for a CPU. vLLM imports it by name in the engine core's process."""

import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

_BURST_GAP_S = 0.002
"""Less than a step."""


class BurstScheduler(Scheduler):
    """vLLM's scheduler, which also waits for the other requests of a burst, so they are prefilled together."""

    def add_request(self, request: Any) -> None:
        """Add a request. If nothing runs, wait for the burst's other requests, which are read before a step."""
        begins = not self.has_unfinished_requests()
        super().add_request(request)
        if begins:
            time.sleep(_BURST_GAP_S)
