"""May Numba compile? It has a variable of its own against it, for debugging."""

import os
from collections.abc import Iterator

from slime_like.config.run import RunConfig
from slime_like.cpu.choice import kernels_are_used


def compiler_problems(config: RunConfig) -> Iterator[str]:
    value = os.environ.get("NUMBA_DISABLE_JIT", "")
    if value.strip("0") and kernels_are_used(config.trainer.cpu_kernels):
        yield (
            f"NUMBA_DISABLE_JIT={value} in the environment keeps Numba from compiling the kernels for a CPU, which do "
            "not run uncompiled; unset it, or use trainer.cpu_kernels=off"
        )
