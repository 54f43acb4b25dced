"""A sharded model on shapes: FSDP's code gathers, frees and sums, and every storage and message is traced."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from backends.common.step.shapes import META
from backends.common.step.trace import Counted, Trace
from backends.fsdp.model import LogprobModel

GATHERED, GRADIENTS = "gathered", "gradients"
"""Labels of gathered weights with their buffers, and of float32 gradients, whole or summed, with their messages."""


class ShardedShapes:
    """A model whose parameter shards, and everything FSDP makes from them, are on torch's meta device.

    Attributes:
        on_host: gradients move to host memory as soon as they are summed.
    """

    def __init__(self, model: LogprobModel, trace: Trace, on_host: bool) -> None:
        self.model = model
        self._messages = {GATHERED: Counted(), GRADIENTS: Counted()}
        self._trace = trace
        self._on_host = on_host
        for module in self._sharded():
            self._put_on_meta(_group(module))

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Let the trace see the model's passes inside the block."""
        with self._trace, self._trace.head_labelled(), self._trace.resizes_followed(), _meta_has_streams():
            yield

    def take_messages(self) -> tuple[Counted, Counted]:
        """Return messages of weights and of gradients since the last call."""
        found = self._messages
        self._messages = {label: Counted() for label in found}
        return found[GATHERED], found[GRADIENTS]

    def _label_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if parameter.grad.dtype == torch.float32:  # others are cast as soon as their layer has all of them
            self._trace.relabel(parameter.grad, GRADIENTS)

    def _sharded(self) -> list[FSDPModule]:
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    def _put_on_meta(self, group: Any) -> None:
        """Move a group to meta. FSDP takes its device from the ranks' mesh, and rejects shards without memory."""
        group.device = META
        for parameter in group.fsdp_params:
            parameter.device = META
        group._validate_no_meta_params = lambda: None
        group.unshard = self._noted(group.unshard, GATHERED)
        group.wait_for_unshard = self._hooked(group, self._noted(group.wait_for_unshard, GATHERED))
        summed = self._noted(group.post_backward, GRADIENTS)
        group.post_backward = self._moved_to_host(group, summed) if self._on_host else summed

    def _noted(self, call: Callable[..., Any], label: str) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            with self._trace.label(label), self._trace.counting(self._messages[label]):
                return call(*arguments, **options)

        return noted

    def _hooked(self, group: Any, wait_for_unshard: Callable[..., Any]) -> Callable[..., None]:
        """Label gradients as soon as autograd has them. Whole parameters exist only after the first gather."""
        hooked: list[Any] = []

        def waited(*arguments: Any) -> None:
            wait_for_unshard(*arguments)
            if not hooked and group.is_unsharded:
                hooked.extend(
                    parameter.unsharded_param.register_post_accumulate_grad_hook(self._label_gradient)
                    for parameter in group.fsdp_params
                    if parameter.sharded_param.requires_grad
                )

        return waited

    def _moved_to_host(self, group: Any, post_backward: Callable[..., Any]) -> Callable[..., None]:
        """Move offloaded, summed gradients off the device immediately."""

        def moved(*arguments: Any) -> None:
            post_backward(*arguments)
            for parameter in group.fsdp_params:
                parameter.sharded_param.grad = None

        return moved


def _group(module: FSDPModule) -> Any:
    """Return the parameters that FSDP gathers together."""
    return module._get_fsdp_state()._fsdp_param_group


@contextlib.contextmanager
def _meta_has_streams() -> Iterator[None]:
    """Provide streams for meta. FSDP finds a device's streams in torch's module of its name; the CPU's do nothing."""
    module: Any = torch
    module.meta = torch.cpu
    try:
        yield
    finally:
        del module.meta
