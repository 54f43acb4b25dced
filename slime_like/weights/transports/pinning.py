"""Host memory that CUDA has locked: copies between it and a GPU need no staging, and may run beside one another."""

import torch
from torch import Tensor

from slime_like.errors import WeightSyncError

_PORTABLE = 1
"""cudaHostRegisterPortable: for all of the process's devices."""


def pin(buffer: Tensor) -> bool:
    """Lock a buffer in host memory, if this process uses CUDA; returns whether it did.

    Raises:
        WeightSyncError: CUDA refuses.
    """
    if not torch.cuda.is_initialized():
        return False
    code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, _PORTABLE))
    if code != 0:
        raise WeightSyncError(
            f"CUDA cannot lock {buffer.nbytes} bytes of shared memory (cudaHostRegister: error {code})",
            code="not-pinned",
            who="weight sync",
            remedy="lower sync.bucket_mb, or raise the limit of locked memory (docker: --ulimit memlock=-1)",
        )
    return True


def unpin(buffer: Tensor) -> None:
    """Unlock what ``pin`` has locked, which must come before its memory is unmapped."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr()))
