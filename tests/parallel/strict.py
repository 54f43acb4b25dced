"""A device that cannot be read, on a CPU: an error for whatever would make the host wait for a GPU.

On a GPU some operations end only when the host has read a result: a number, a mask's number of entries, an error
flag. Others copy from memory that is not pinned. All of them are known by their names.
"""

import contextlib
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from backends.megatron import cpu_devices

_aten = torch.ops.aten

_READ_BACK = {
    _aten._local_scalar_dense,
    _aten.equal,
    _aten.is_nonzero,
    _aten.nonzero,
    _aten.masked_select,
    _aten._unique,
    _aten._unique2,
    _aten.unique_dim,
    _aten.unique_consecutive,
    _aten.unique_dim_consecutive,
    _aten.bincount,
    _aten.histc,
    _aten.multinomial,
    _aten._linalg_check_errors,
}
_ROUTED = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}

# On a CPU the dispatcher does not see these.
_LEAVES = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}
# Numbers of the host, for a device if one is named.
_BRINGS = {torch.tensor, torch.as_tensor}


class WaitsForDevice(AssertionError):
    """The host would wait."""


class StrictDevice(contextlib.ExitStack):
    """Inside, every tensor counts as a device's, except where it is ``paused``.

    Attributes:
        watched: how many operations were looked at.
        allowed: how often each of the lines of libraries waited that may, ``file.py: text of the line``.
    """

    def __init__(self, allowed: Set[str] = frozenset()) -> None:
        super().__init__()
        self.watched = 0
        self.allowed: Counter[str] = Counter()
        self._lines = allowed
        self._is_paused = False

    def __enter__(self) -> "StrictDevice":
        calls = self.enter_context(_Calls(self))
        self.enter_context(_Operations(self))
        # torch leaves a mode for calls while it handles one, and ``backward`` is a call.
        run, patch = torch.autograd._engine_run_backward, self.enter_context(pytest.MonkeyPatch.context())

        def run_backward(*arguments: Any, **options: Any) -> Any:
            with calls:
                return run(*arguments, **options)

        patch.setattr(torch.autograd, "_engine_run_backward", run_backward)
        patch.setattr(cpu_devices, "synchronized", lambda: self.look_at("synchronize", waits=True))
        return self

    def on_host(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose tensors are the host's."""

        def call(*arguments: Any, **options: Any) -> Any:
            with self.paused():
                return function(*arguments, **options)

        return call

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def look_at(self, name: object, waits: bool) -> None:
        if self._is_paused:
            return
        self.watched += 1
        if not waits:
            return
        line, number = _calling_line()
        if line not in self._lines:
            raise WaitsForDevice(f"{name} in line {number} of {line}")
        self.allowed[line] += 1


def _calling_line() -> tuple[str, int]:
    """The innermost line of code outside of torch and its stand-ins, as ``file.py: text``, and its number."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename in (__file__, cpu_devices.__file__) or "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    name, number = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(name).name}: {linecache.getline(name, number).strip()}", number


class _Operations(TorchDispatchMode):
    def __init__(self, device: StrictDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        self._device.look_at(func, _waits(func, args, options))
        return func(*args, **options)


class _Calls(TorchFunctionMode):
    def __init__(self, device: StrictDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        brings = func is Tensor.new_tensor or (func in _BRINGS and options.get("device") is not None)
        self._device.look_at(func, brings or func in _LEAVES)
        return func(*args, **options)


def _waits(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    packet = func.overloadpacket
    if packet in _READ_BACK:
        return True
    if packet in _ROUTED:  # a mask is counted first, unless one number is filled in
        masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
        return bool(masks) and not (len(args) > 2 and args[2].numel() == 1)
    if packet is _aten.repeat_interleave:
        return options.get("output_size") is None
    if packet is _aten.segment_reduce:
        return not options.get("unsafe", False)
    return False
