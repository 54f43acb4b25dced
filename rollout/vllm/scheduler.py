"""vLLM's scheduler on a CPU, with one habit more. vLLM imports it by name in the engine core's process."""

import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

_BURST_GAP_S = 0.002
"""Less than a step."""


class BurstScheduler(Scheduler):
    """Requests come in bursts: where nothing runs, those that begin together are prefilled together."""

    def add_request(self, request: Any) -> None:
        """While the first of a burst waits, the others reach the core's queue, which it empties before it steps."""
        begins = not self.has_unfinished_requests()
        super().add_request(request)
        if begins:
            time.sleep(_BURST_GAP_S)
