"""A server that imports everything once and forks ranks, commands and Ray's workers.

The server runs no tests. Tests leave threads, locks, environment variables and patches in their process, which forks
would inherit, and a fork of a process with threads may hang.
"""

import multiprocessing
from multiprocessing import forkserver
from typing import Any

import pytest

from slime_like.plugins.options import OPTIONS

# Forks have imported these modules. A module that fails to import in the server is imported by every fork.
PRELOADED = [
    "tests.support.uncollected",  # the first one
    "pytest", "hypothesis", "ray", "ray._private.runtime_env.agent.runtime_env_agent", "ray.dashboard.utils",
    "torch._dynamo",  # which optimizers import
    "backends.fsdp.trainer", "backends.megatron.trainer",
    "transformers.models.deepseek_v3.modeling_deepseek_v3", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "rollout.transformers.engine", "slime_like.commands.root", "slime_like.orchestration.rollout.engine_actor",
    "slime_like.orchestration.trainer.rank", "slime_like.train", "aiohttp", "math_verify",
    "pyarrow",  # which Ray imports in every worker
    *sorted({path.partition(":")[0] for path in OPTIONS.values()}),
    "slime_like.models.families.deepseek_v3", "slime_like.models.families.gemma3",
    "slime_like.models.families.gpt_oss", "slime_like.models.families.qwen3_next",
    "tests.parallel.frozen",  # the last one
]  # fmt: skip

FIRST_JOB, ANY_JOB = "01000000", "ffffffff"


def clean_forks() -> Any:
    """Return a multiprocessing context that forks from the server. The first user's list of modules counts, so all
    forks must use this context."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        # Ray's core reads these when it is imported. A worker ends with its shim, not with a raylet, whose id, for a
        # worker on a host of tests/hosts, would be another process's.
        patch.setenv("RAY_JOB_ID", FIRST_JOB)
        patch.setenv("RAY_RAYLET_PID", "1")
        forkserver.ensure_running()
    return context
