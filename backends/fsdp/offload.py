"""Moving a trainer's weights, gradients and optimizer state between device and host memory (colocated mode)."""

import torch

from backends.fsdp.model import LogprobModel
from backends.fsdp.optimizer import Optimizer


def to_host(model: LogprobModel, optimizer: Optimizer | None, keep_weights: bool, lives_there: bool) -> None:
    """Free the device. Gradients are dropped: a step must not be open. Without CUDA there is nothing to move.

    May be called again, first with ``keep_weights``, then without.

    Args:
        lives_there: weights and moments are in host memory anyway (``trainer.optimizer.offload``).
    """
    if not torch.cuda.is_available():
        return
    model.shard_weights()
    if optimizer is not None:
        optimizer.zero_gradients()
    if not lives_there:
        if not keep_weights:
            model.to("cpu")
        if optimizer is not None:
            optimizer.move("cpu")
    torch.cuda.empty_cache()


def to_device(model: LogprobModel, optimizer: Optimizer | None, device: torch.device, lives_there: bool) -> None:
    """The inverse of ``to_host``."""
    if not torch.cuda.is_available() or lives_there:
        return
    model.to(device)
    if optimizer is not None:
        optimizer.move(device)
