"""Tracing of a computation on shapes: how much memory it would use, what it would compute, what it would send.

Tensors on torch's meta device have shapes and storage sizes, but no memory. A ``Trace`` sees every operation on them,
like on real tensors: it needs neither the model's memory nor a GPU, and runs the actual training code.
"""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from backends.common.step.shapes import compute_on_shapes, shape_of, tensors_in
from slime_like.algorithms import head
from slime_like.interfaces.estimate import Axis, Pattern, Traffic, Work

HEAD = "head"

_aten = torch.ops.aten

MessageTotals = dict[tuple[tuple[int, ...], Pattern], tuple[int, int, int]]
"""Bytes sent, calls, and bytes of asynchronous calls, keyed by the ranks of a process group and how they exchange."""

_TILE_ROWS = 128
"""Rows of a tile of grouped products: an expert's last tile is computed whole (CUTLASS's tiles on Hopper)."""


_COUNTS = ("matmul_flops", "attention_flops", "kernel_bytes", "head_flops", "grouped_flops", "kernels")


@dataclass(slots=True)
class Counted:
    """Floating-point operations as in ``slime_like.interfaces.estimate.Work``, and this rank's messages."""

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    sent: MessageTotals = field(default_factory=dict)
    kernel_bytes: float = 0.0
    head_flops: float = 0.0
    grouped_flops: float = 0.0
    kernels: int = 0

    def add_sent(
        self, ranks: Sequence[int], nbytes: int, count: int = 1, hidden: int = 0, pattern: Pattern = "gather"
    ) -> None:
        """Add ``count`` messages or collectives of ``nbytes`` in total, of which ``hidden`` are asynchronous."""
        sent = self.sent.get((tuple(ranks), pattern), (0, 0, 0))
        self.sent[tuple(ranks), pattern] = sent[0] + nbytes, sent[1] + count, sent[2] + hidden

    def work(self, axes: Mapping[tuple[int, ...], Axis], default: Axis, further: Sequence[Traffic]) -> Work:
        """Return this work, with ``further`` messages. ``axes`` maps groups to axes; all others get ``default``."""
        sent = (
            Traffic(axes.get(ranks, default), ranks, *figures, pattern)
            for (ranks, pattern), figures in self.sent.items()
        )
        counts = {name: getattr(self, name) for name in _COUNTS}
        return Work(traffic=(*sent, *further), **counts)

    def add(self, other: Self) -> None:
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for (ranks, pattern), figures in other.sent.items():
            self.add_sent(ranks, *figures, pattern)


@dataclass(slots=True)
class _Live:
    """A live storage: its current size, and the label it counts under."""

    reference: weakref.ref[Any]
    nbytes: int
    label: str


class Trace(TorchDispatchMode):
    """Counter, inside its ``with`` block, of live storages, floating-point operations and messages.

    Only storages created inside count. Each counts once, however many tensors share it, until the last of them is gone.
    If a real tensor meets a meta tensor in an operation, its shape is used. So small tensors whose values determine the
    computation (boundaries, rows, routes) may stay real.

    Attributes:
        live: bytes of all live storages created inside.
        labelled: the same bytes, by the label under which they were created.
        peak: largest ``live`` since ``restart_peak``.
        peak_labelled: ``labelled`` at that moment.
        counted: work and messages; may be replaced by a new one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.labelled: dict[str, int] = {}
        self.peak_labelled: dict[str, int] = {}
        self.counted = Counted()
        self._label = ""
        self._storages: dict[int, _Live] = {}

    def restart_peak(self) -> None:
        """Reset the peak to the current memory."""
        self.peak, self.peak_labelled = self.live, dict(self.labelled)

    @contextlib.contextmanager
    def _replaced(self, attribute: str, value: Any) -> Iterator[None]:
        before = getattr(self, attribute)
        setattr(self, attribute, value)
        try:
            yield
        finally:
            setattr(self, attribute, before)

    def label(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Count storages created inside also under ``name``."""
        return self._replaced("_label", name)

    def relabel(self, tensor: Tensor, name: str) -> None:
        """Count a storage created inside under ``name`` from now on."""
        found = self._storages[tensor.untyped_storage()._cdata]
        self._change(-found.nbytes, found.label)
        found.label = name
        self._change(found.nbytes, name)

    def counting(self, counted: Counted) -> contextlib.AbstractContextManager[None]:
        """Add work and messages inside the block to ``counted``."""
        return self._replaced("counted", counted)

    @contextlib.contextmanager
    def follow_resizes(self) -> Iterator[None]:
        """Inside, count storages that are emptied and refilled with their current size."""
        storage_class: Any = torch.UntypedStorage
        original = storage_class.resize_

        def resize(storage: Any, nbytes: int) -> Any:
            result = original(storage, nbytes)
            if (found := self._storages.get(storage._cdata)) is not None:
                self._change(nbytes - found.nbytes, found.label)
                found.nbytes = nbytes
                self._note_peak()
            return result

        storage_class.resize_ = resize
        try:
            yield
        finally:
            storage_class.resize_ = original

    def restart(self) -> int:
        """Restart the counts of work and the peak; return the current bytes."""
        self.counted = Counted()
        self.restart_peak()
        return self.live

    @contextlib.contextmanager
    def head_labelled(self) -> Iterator[None]:
        """Count storages that the head creates inside also under ``HEAD``."""

        def labelled(original: Callable[..., Any]) -> Any:
            def call(*arguments: Any) -> Any:
                with self.label(HEAD):
                    return original(*arguments)

            return staticmethod(call)

        functions: list[Any] = [head.FusedLogprobs, head._ReverseKL]
        originals = [(function.forward, function.backward) for function in functions]
        for function, both in zip(functions, originals, strict=True):
            function.forward, function.backward = map(labelled, both)
        try:
            yield
        finally:
            for function, both in zip(functions, originals, strict=True):
                function.forward, function.backward = map(staticmethod, both)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func.namespace == "c10d":
            _count_message(func, args, self.counted)
            if func._overloadpacket.__name__ in _NOT_ON_META:
                args = tree_map_only(Tensor, lambda tensor: torch.empty(0, dtype=tensor.dtype), args)
            return func(*args, **given)
        inputs = [*tensors_in(args), *tensors_in(given.values())]
        on_shapes = any(value.is_meta for value in inputs)
        if on_shapes and not all(value.is_meta for value in inputs):
            if func is _aten.masked_select.default:  # the mask's values determine the shape
                out = args[0].new_empty(int(args[1].sum()))
                self._record([], [out])
                return out
            args, given = tree_map_only(Tensor, shape_of, (args, given))
        out = compute_on_shapes(func, args, given) if on_shapes and not types else func(*args, **given)
        before = self.counted.matmul_flops
        made = [out] if isinstance(out, Tensor) else tensors_in(out)
        is_product = _count_flops(func._overloadpacket, args, given, inputs, out, self.counted)
        if not (is_product or func.is_view or func._overloadpacket in _NO_KERNEL):
            written = sum(tensor.nbytes for tensor in made)
            read = written if func._overloadpacket in _PICKS else sum(tensor.nbytes for tensor in inputs)
            self.counted.kernel_bytes += written + read
        self.counted.kernels += not (func.is_view or func._overloadpacket in _NO_KERNEL)
        if self._label == HEAD:
            self.counted.head_flops += self.counted.matmul_flops - before
        self._record(inputs, made)
        return out

    def _record(self, inputs: list[Tensor], made: list[Tensor]) -> None:
        """Record the storages of ``made`` that no input has."""
        old = {value.untyped_storage()._cdata for value in inputs}
        for tensor in made:
            storage = tensor.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
            if key in old or key in self._storages or not nbytes:
                continue
            self._storages[key] = _Live(weakref.ref(storage, partial(self._forget, key)), nbytes, self._label)
            self._change(nbytes, self._label)
        self._note_peak()

    def _note_peak(self) -> None:
        if self.live > self.peak:
            self.restart_peak()

    def _forget(self, key: int, _: Any) -> None:
        found = self._storages.pop(key)
        self._change(-found.nbytes, found.label)

    def _change(self, nbytes: int, label: str) -> None:
        self.live += nbytes
        self.labelled[label] = self.labelled.get(label, 0) + nbytes


_MATMULS = frozenset({_aten.mm, _aten.bmm, _aten.addmm, _aten.addmm_, _aten.baddbmm})

_ATTENTION: dict[Any, tuple[int, int, int | None, int]] = {
    _aten._flash_attention_forward: (2, 0, 3, 8),
    _aten._flash_attention_backward: (5, 1, 6, 11),
    _aten._scaled_dot_product_flash_attention_for_cpu: (2, 0, None, 4),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (5, 1, None, 7),
}
"""For each operator: number of products as large as queries times keys; positions of the queries and of both boundaries
(None: of a batch) among the inputs, and of the mask among the arguments, which may end before it.

Backward needs five products: the scores again, and the gradients of scores, values, queries and keys.
"""


_NO_KERNEL = frozenset({_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten._unsafe_view})
_PICKS = frozenset({_aten.embedding, _aten.index_select, _aten.gather, _aten.index})
"""Operators that read no more than they return."""


def _count_flops(
    operator: Any, args: tuple[Any, ...], given: dict[str, Any], inputs: list[Tensor], out: Any, counted: Counted
) -> bool:
    """Count matrix products and attention; return whether the operator is one of them."""
    if operator in _MATMULS:  # 2 m n k for each product of the batch; the factors are the last two of ``args``
        counted.matmul_flops += 2.0 * math.prod(out.shape) * tensors_in(args)[-2].shape[-1]
    elif operator is _aten._grouped_mm:  # (T, K) rows, (E, K, N) experts; or (K, T), (T, N) for the weights' gradient
        rows_last = inputs[1].ndim == 2
        rows, width = inputs[0].shape[:: -1 if rows_last else 1]
        experts = inputs[2].numel() if rows_last else len(inputs[1])
        padded = experts * -(-rows // (experts * _TILE_ROWS)) * _TILE_ROWS  # even routing
        counted.grouped_flops += 2.0 * padded * width * inputs[1].shape[-1]
    elif operator in _ATTENTION:
        products, place, boundaries, mask = _ATTENTION[operator]
        query, key = inputs[place : place + 2]
        causal, window = len(args) > mask and args[mask], given.get("window_size_left")
        if boundaries is None:  # (batch, heads, length, D)
            pairs = query.numel() * key.shape[2] * (0.5 if causal else 1.0)
        else:  # (T, heads, D)
            spans = (pairwise(ends.tolist()) for ends in inputs[boundaries : boundaries + 2])
            lengths = ((q_end - q, k_end - k) for (q, q_end), (k, k_end) in zip(*spans, strict=True))
            pairs = sum(_pairs(*each, causal, window) for each in lengths) * query.shape[1] * query.shape[2]
        counted.attention_flops += products * 2.0 * pairs
    else:
        return False
    return True


def _pairs(queries: int, keys: int, causal: bool, window: int | None) -> float:
    """Return the number of keys that a segment's queries see in all. ``window``: further keys on a query's left."""
    most = keys if window is None else window + 1
    before, after = (min(end, most) * (end - min(end, most) / 2) for end in (keys - queries, keys))
    return after - before if causal else queries * keys


def _count_message(func: Any, args: tuple[Any, ...], counted: Counted) -> None:
    """Count the bytes that leave this rank, by the ring algorithms of NCCL (bandwidth terms only)."""
    group = next((found for value in args if (found := _group(value)) is not None), None)
    name = func._overloadpacket.__name__
    if group is None or name in _NOTHING_SENT or group.size() == 1:
        return
    if name not in _SENT:
        raise NotImplementedError(f"planning: unknown collective c10d.{name}; add the bytes that it sends to _SENT")
    argument, factor, pattern = _SENT[name]
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(args[argument : argument + 1]))
    sent = round(nbytes * factor(group.size()))
    asynchronous = any(argument.name == "async_op" for argument in func._schema.arguments)
    hidden = sent if asynchronous and not any(value is False for value in args) else 0
    counted.add_sent(dist.get_process_group_ranks(group), sent, hidden=hidden, pattern=pattern)


def _group(value: Any) -> Any:
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(value)
    except RuntimeError:  # a reduction's name is passed as an object, too
        return None


# torch has no meta kernels for these, but the group moves nothing anyway.
_NOT_ON_META = frozenset(
    {"allreduce_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"}
)

_NOTHING_SENT = frozenset({"recv_", "recv_any_source_", "barrier", "monitored_barrier_"})


# The argument whose size counts, the multiple of its bytes that one rank sends, given the number of ranks, and the way.
_SENT: dict[str, tuple[int, Callable[[int], float], Pattern]] = {
    "send": (0, lambda ranks: 1.0, "message"),
    "broadcast_": (0, lambda ranks: 1.0, "gather"),
    "allreduce_": (0, lambda ranks: 2 * (ranks - 1) / ranks, "all_reduce"),
    "allreduce_coalesced_": (0, lambda ranks: 2 * (ranks - 1) / ranks, "all_reduce"),
    "allgather_": (1, lambda ranks: ranks - 1, "gather"),
    "_allgather_base_": (1, lambda ranks: ranks - 1, "gather"),
    "allgather_into_tensor_coalesced_": (1, lambda ranks: ranks - 1, "gather"),
    "reduce_scatter_": (0, lambda ranks: ranks - 1, "gather"),
    "_reduce_scatter_base_": (0, lambda ranks: ranks - 1, "gather"),
    "reduce_scatter_tensor_coalesced_": (0, lambda ranks: ranks - 1, "gather"),
    "alltoall_base_": (1, lambda ranks: (ranks - 1) / ranks, "all_to_all"),
}
