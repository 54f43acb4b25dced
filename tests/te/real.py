"""The installed Transformer Engine in the place of ``tests.parallel.te_stand_ins``, in ``scripts/test_te.sh``."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from megatron.core.extensions import transformer_engine as extension
from megatron.core.optimizer import Adam
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.attention.dot_product_attention import backends, context_parallel
from transformer_engine.pytorch.optimizers import FusedAdam

NAME = "NVIDIA H100 80GB HBM3"
PROPERTIES = SimpleNamespace(name=NAME, major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30)


def install() -> None:
    """Let Transformer Engine choose what it would on an H100."""
    assert extension.HAVE_TE and issubclass(extension.TELinear, te.Linear) and Adam is FusedAdam
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda *device: PROPERTIES
    cuda.get_device_capability = lambda *device: (PROPERTIES.major, PROPERTIES.minor)
    cuda.get_device_name = lambda *device: NAME
    cuda.is_current_stream_capturing = lambda: False
    context_parallel.flash_attn_p2p_communicate = _communicate
    backends.UnfusedDotProductAttention.forward = _refused
    # Recomputation keeps the device's random state, which nothing here draws from.
    distributed._get_cuda_rng_state = lambda **options: torch.empty(0)
    distributed._set_cuda_rng_state = lambda state, **options: None


def _refused(*arguments: Any, **options: Any) -> None:
    raise AssertionError("Transformer Engine chose attention of torch's operators, not cuDNN's")


class _Message:
    """A message that may be waited for more than once.

    Transformer Engine's backward pass waits for every exchange of keys twice. NCCL returns; gloo would wait for another
    message.
    """

    def __init__(self, work: dist.Work) -> None:
        self._work: dist.Work | None = work

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()


def _communicate(*arguments: Any) -> list[_Message]:
    return [_Message(work) for work in _COMMUNICATE(*arguments)]


_COMMUNICATE = context_parallel.flash_attn_p2p_communicate
