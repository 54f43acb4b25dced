"""Executor for several ranks on a CPU. vLLM imports it by name in the engine core's process."""

import os

from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class ForkedRanks(MultiprocExecutor):
    """Executor that forks its ranks from the engine core.

    On a CPU, vLLM spawns ranks to bind their OpenMP threads, which ``prepare_environment`` turns off. Importing vLLM
    again in each rank would take most of the start.
    """

    def _init_executor(self) -> None:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        super()._init_executor()
