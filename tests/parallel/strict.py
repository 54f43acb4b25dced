"""A CPU mode that raises an error for every operation that would make the host wait for a GPU.

Some operations on a GPU end only when the host has read a result: a number, the number of a mask's entries, an error
flag. Others copy from memory that is not pinned. This module knows all of them by name.
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

from backends.megatron import cpu_runtime

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

# The dispatcher does not see these on a CPU.
_LEAVES = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}
# These make tensors from the host's numbers, on a device if one is named.
_BRINGS = {torch.tensor, torch.as_tensor}


class WaitsForDevice(AssertionError):
    """An operation would make the host wait."""


class StrictDevice(contextlib.ExitStack):
    """Treats every tensor in its block as one on a device, except while ``paused``.

    Attributes:
        watched: number of operations that were checked.
        allowed: how often each of the allowed lines waited, by ``file.py: text of the line``.
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
        # torch disables the mode while it handles a call, and ``backward`` is a call.
        run, patch = torch.autograd._engine_run_backward, self.enter_context(pytest.MonkeyPatch.context())

        def run_backward(*arguments: Any, **options: Any) -> Any:
            with calls:
                return run(*arguments, **options)

        patch.setattr(torch.autograd, "_engine_run_backward", run_backward)
        patch.setattr(cpu_runtime, "synchronized", lambda: self.look_at("synchronize", waits=True))
        return self

    def on_host(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with the checks paused, because its tensors are on the host."""

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
    """Return the innermost line outside torch and this module, as ``file.py: text``, and its number."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename in (__file__, cpu_runtime.__file__) or "/torch/" in frame.f_code.co_filename:
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
    if packet in _ROUTED:  # a mask's entries are counted first, unless a single number is written
        masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
        return bool(masks) and not (len(args) > 2 and args[2].numel() == 1)
    if packet is _aten.repeat_interleave:
        return options.get("output_size") is None
    if packet is _aten.segment_reduce:
        return not options.get("unsafe", False)
    return False
