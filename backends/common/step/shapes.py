"""Operations on tensors of torch's meta device, which have shapes and storage sizes, but no memory."""

from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

META = torch.device("meta")


def tensors_in(values: Any) -> list[Tensor]:
    """List the tensors among an operation's arguments or results, including inside lists."""
    found: list[Tensor] = []
    for value in values if isinstance(values, Iterable) else ():
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def shape_of(tensor: Tensor) -> Tensor:
    """Return a meta tensor like ``tensor``, or the tensor itself if it is one."""
    if tensor.is_meta:
        return tensor
    like: dict[str, Any] = {"dtype": tensor.dtype, "requires_grad": tensor.requires_grad}
    return torch.empty_strided(tensor.shape, tensor.stride(), device=META, **like)


class _Shape(NamedTuple):
    """Description of a tensor on the meta device."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=META)


def compute_on_shapes(func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """Compute an operation on meta tensors.

    Most of torch's kernels for them are Python code of up to a millisecond. Layers, rows and micro-batches repeat the
    same operations, so the shapes of results are remembered.
    """
    made = _made(func, _frozen(args), _frozen([*given.items()])) if _returns_new_tensors(func) else None
    if made is None:
        return func(*args, **given)
    tensors = [shape and shape.tensor() for shape in made]
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


@lru_cache(maxsize=2**15)
def _made(func: Any, args: Any, given: Any) -> list[_Shape | None] | None:
    """Return the shapes of an operation's results, with None for each result that it leaves out.

    Return None instead if a result shares memory with another tensor or is part of a larger storage.
    """
    inputs, options = _thawed(args), dict(_thawed(given))
    out = func(*inputs, **options)
    made: list[Tensor | None] = [*out] if isinstance(out, tuple) else [out]
    used = {each.untyped_storage()._cdata for each in tensors_in([inputs, [*options.values()]])}
    shapes: list[_Shape | None] = []
    for tensor in made:
        if tensor is None:
            shapes.append(None)
            continue
        shapes.append(shape := _Shape(tensor.shape, tensor.stride(), tensor.dtype))
        storage = tensor.untyped_storage()
        if storage._cdata in used or storage.nbytes() != shape.tensor().untyped_storage().nbytes():
            return None
        used.add(storage._cdata)
    return shapes


@cache
def _returns_new_tensors(func: Any) -> bool:
    schema = func._schema
    returned = all(str(each.type) == "Tensor" for each in schema.returns)
    return func.namespace == "aten" and not func.is_view and not schema.is_mutable and returned


def _frozen(value: Any) -> Any:
    """Return a hashable description of an argument. Classes are part of it, because ``1 == 1.0 == True``."""
    if isinstance(value, Tensor):
        return _Shape(value.shape, value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return list, tuple(_frozen(each) for each in value)
    return type(value), value


def _thawed(frozen: Any) -> Any:
    if isinstance(frozen, _Shape):
        return frozen.tensor()
    kind, value = frozen
    return [_thawed(each) for each in value] if kind is list else value
