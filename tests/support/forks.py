"""A server beside the test process that imports everything once and forks ranks, commands and Ray's workers.

The server runs no test. What tests leave in their own process (threads, locks held by them, environment variables,
patches) would be inherited by its forks, and a fork of a process with threads may hang.
"""

import multiprocessing
import os
from multiprocessing import forkserver
from typing import Any

import pytest

# What is forked from the server has these already; a module that does not import there would be imported by every fork.
PRELOADED = [
    "pytest",
    "hypothesis",
    "ray",
    "ray._private.runtime_env.agent.runtime_env_agent",
    "ray.dashboard.utils",
    "torch._dynamo",  # which optimizers import
    "backends.fsdp.trainer",
    "backends.megatron.trainer",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "rollout.transformers.engine",
    "slime_like.commands.root",
    "slime_like.orchestration.rollout.engine_actor",
    "slime_like.orchestration.trainer.rank",
    "slime_like.train",
    "aiohttp",
    "math_verify",
    "matplotlib.backends.backend_agg",  # draws the curve of a run
    "matplotlib.figure",
    "pyarrow",  # which Ray imports in every worker
    "tests.parallel.frozen",  # the last one
]

FIRST_JOB = "01000000"


def clean_forks() -> Any:
    """Processes forked from the server. A test process has one, with the modules that its first user asks for: all
    forks go through here, or later ranks import everything themselves."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        # What Ray's core reads as it is imported: of a cluster, the first job; a worker ends with its shim instead.
        patch.setenv("RAY_JOB_ID", FIRST_JOB)
        patch.setenv("RAY_RAYLET_PID", str(os.getpid()))
        forkserver.ensure_running()
    return context
