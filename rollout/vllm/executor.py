"""vLLM's executor of several ranks on a CPU. vLLM imports it by name in the engine core's process."""

import os

from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class ForkedRanks(MultiprocExecutor):
    """Forks its ranks from the engine core, as vLLM does where there are GPUs.

    On a CPU vLLM spawns them, to bind their OpenMP threads, which ``prepare_environment`` turns off: importing vLLM
    once more in each rank would take most of the start.
    """

    def _init_executor(self) -> None:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        super()._init_executor()
