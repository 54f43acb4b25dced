"""A loss that hangs, and a freezer of processes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from slime_like.algorithms import LossInputs, PolicyTerms, required, token_ratio

_FREEZER = Path("/sys/fs/cgroup/freezer")
_last_call = [0.0]


@dataclass(frozen=True)
class HangsInFifo:
    """REINFORCE, which on rank 1 waits for a writer once the pipe ``fifo`` exists, like a dead network drive.

    It does so in the first micro-batch of a step, so other ranks get further.
    """

    fifo: str

    name = "hangs"
    needs_old = True
    needs_advantages = True
    per_sequence = False

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        is_first = time.monotonic() - _last_call[0] > 0.2  # sampling takes longer than a micro-batch
        if is_first and dist.get_rank() == 1 and Path(self.fifo).exists():
            Path(self.fifo).read_bytes()
        _last_call[0] = time.monotonic()
        ratio = token_ratio(inputs).detach()
        return PolicyTerms(-required(inputs, "advantages") * inputs.logprobs, ratio, clipped=ratio != ratio)


@contextmanager
def frozen(process: psutil.Process, name: str) -> Iterator[None]:
    """Freeze a process inside, in the control group ``name``. It is then in state D, and SIGKILL does not end it."""
    if not _FREEZER.is_dir():
        pytest.skip("needs the freezer of control groups, version 1")
    group = _FREEZER / name
    group.mkdir()
    (group / "cgroup.procs").write_text(str(process.pid))
    (group / "freezer.state").write_text("FROZEN")
    try:
        yield
    finally:
        (group / "freezer.state").write_text("THAWED")
        with suppress(psutil.NoSuchProcess):
            process.wait(30)
        group.rmdir()
