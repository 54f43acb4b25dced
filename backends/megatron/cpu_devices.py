"""Redirection of CUDA's devices, streams and literal ``device="cuda"`` to an available device."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.jit._builtins import _find_builtin, _register_builtin
from torch.utils._device import _device_constructors

from backends.megatron.versions import Patch


def device_patches(target: str) -> list[Patch]:
    """Redirect Megatron's CUDA calls to ``target``, "cpu" or "meta"."""
    cuda = torch.cuda
    return [
        Patch(cuda, "current_device", lambda: torch.device("meta") if target == "meta" else torch.cpu.current_device()),
        Patch(cuda, "synchronize", lambda *device: synchronized()),
        *(Patch(cuda, name, _Done) for name in ("Stream", "Event", "current_stream", "default_stream")),
        Patch(cuda, "stream", contextlib.nullcontext),
        *_literal_patches(target),
    ]


# ------------------------------------------------------------------------------------------------ device and streams
def synchronized() -> None:
    """Do nothing, where the host of a GPU would wait for it."""


class _Done:
    """A finished stream or event: the CPU runs operations in program order."""

    def __init__(self, *unused: Any, **options: Any) -> None:
        pass

    wait_stream = wait_event = record = wait = __init__

    def synchronize(self) -> None:
        synchronized()

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Done()


# ------------------------------------------------------------------------------------------- literal CUDA devices
_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace"),
    *("ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor"),
    *("zeros", "zeros_like"),
)
_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "to")


def _literal_patches(target: str) -> list[Patch]:
    """Convert ``device="cuda"``, ``Tensor.cuda()`` and pinned memory to their equivalents on ``target``.

    Functions are replaced in the places where Megatron looks them up. A ``TorchFunctionMode`` would see every
    operation, but add some microseconds to each: 3 % of a small model's forward and backward.
    """
    # Code that records functions on first use must see the originals.
    _device_constructors()  # the functions that ``with torch.device(...)`` applies to
    redirected = functools.partial(_redirected, target=torch.device(target))
    factories = [Patch(torch, name, redirected(getattr(torch, name))) for name in _FACTORIES]
    methods = [Patch(torch.Tensor, name, redirected(getattr(torch.Tensor, name))) for name in _METHODS]
    moves = ("cuda", "pin_memory", "record_stream")
    stays = [Patch(torch.Tensor, name, lambda tensor, *_, **__: tensor) for name in moves]
    return [*factories, *methods, *stays, Patch(torch.Tensor, "type", _type_on_cuda)]


def _redirected(make: Callable[..., Any], target: torch.device) -> Callable[..., Any]:
    """Wrap ``make``: replace any CUDA device in its arguments by ``target``, and drop pinned memory."""

    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = target
            kwargs.pop("pin_memory", None)
        if any(map(_is_cuda, args)):
            args = tuple(target if _is_cuda(value) else value for value in args)
        return make(*args, **kwargs)

    if (operator := _find_builtin(make)) is not None:
        _register_builtin(call, operator)  # so that torch.jit.script still compiles whatever is imported meanwhile
    return call


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


def _type_on_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return CUDA type names: Megatron's optimizer accepts parameters by type name ("torch.cuda.FloatTensor")."""
    found = _TYPE(tensor, *args, **kwargs)
    if not isinstance(found, str):
        return found
    return found.replace("torch.", "torch.cuda.", 1).replace("cuda.meta.", "cuda.", 1)


_TYPE = torch.Tensor.type
