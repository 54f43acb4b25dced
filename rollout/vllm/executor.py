"""Executor for several ranks on a CPU. vLLM imports it by name in the engine core's process."""

import os
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class ForkedRanks(MultiprocExecutor):
    """Executor that forks its ranks from the engine core.

    On a CPU, vLLM spawns ranks to bind their OpenMP threads, which ``prepare_environment`` turns off. Importing vLLM
    again in each rank would take most of the start.
    """

    def _init_executor(self) -> None:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        super()._init_executor()


def make_stage_buffer(worker: Any) -> None:
    """Make the buffer for hidden states of the previous stage. vLLM 0.32 does so in a profile, which a CPU skips."""
    runner = worker.model_runner
    if runner.intermediate_tensors is None:
        size, dtype = runner.max_num_tokens, runner.model_config.dtype
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(size, dtype, runner.device)
