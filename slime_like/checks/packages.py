"""Packages that settings need, and what keeps them from working. They are looked up, not imported."""

import os
from collections.abc import Iterator
from importlib.util import find_spec

from slime_like.config.run import RunConfig
from slime_like.cpu.choice import kernels_are_used


def compiler_problems(config: RunConfig) -> Iterator[str]:
    value = os.environ.get("NUMBA_DISABLE_JIT", "")
    if value.strip("0") and kernels_are_used(config.trainer.cpu_kernels):
        yield (
            f"NUMBA_DISABLE_JIT={value} in the environment keeps Numba from compiling the kernels for a CPU, which do "
            "not run uncompiled; unset it, or use trainer.cpu_kernels=off"
        )


def logging_problems(config: RunConfig) -> Iterator[str]:
    wanted = (("wandb", config.logging.wandb), ("tensorboard", config.logging.tensorboard))
    for package, asked in wanted:
        if asked and find_spec(package) is None:
            yield f"logging.{package}=true, but the package is not installed; pip install {package}, or set it to false"
