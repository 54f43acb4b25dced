"""Code written down as vector instructions, since loops over a head or a sequence are too short for LLVM to find them.

Arrays are contiguous float32, of any number of axes; where elements lie counts from their beginning, unchecked.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter, Signature
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

ARRAY = None
INT, FLOAT = types.int64, types.float32
LINE = np.uint64(16)
"""Elements of float32 in 64 bytes, a cache line of x86 and most ARM processors."""
_WORD = ir.IntType(32)


def vector_code(lanes: int, result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function that kernels call of one that generates its code.

    Args:
        lanes: float32 in a vector.
        result: type; ``types.void`` for none.
        arguments: their types, ``ARRAY`` for an array.
    """

    def decorate(generate: Callable[..., Any]) -> Any:
        def typed(_: Any, *given: Any) -> Any:
            return result(*(given[i] if kind is ARRAY else kind for i, kind in enumerate(arguments))), generated

        def generated(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            kinds = zip(signature.args, values, strict=True)
            made = generate(
                Vectors(builder, lanes),
                *(
                    context.make_array(k)(context, builder, v).data if isinstance(k, types.Array) else v
                    for k, v in kinds
                ),
            )
            if isinstance(made, tuple):
                return context.make_tuple(builder, signature.return_type, made)
            return context.get_dummy_value() if made is None else made

        names = ("context", *(f"argument_{i}" for i in range(len(arguments))))
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        typed.__signature__ = Signature(parameters)  # type: ignore[attr-defined] # Numba counts them
        return intrinsic(typed)

    return decorate


@vector_code(1, types.void, ARRAY, types.uint64)
def prefetch(code: "Vectors", array: Any, index: Any) -> None:
    """Ask for the cache line of the element ``index``: it comes while something else is computed.

    A hint, which changes no result; an address that is none is ignored.
    """
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _WORD, _WORD, _WORD])
    function = cgutils.get_or_insert_function(code.builder.module, kind, "llvm.prefetch.p0")
    address = code.builder.bitcast(code.builder.gep(array, [index]), byte)
    code.builder.call(function, [address, _WORD(0), _WORD(3), _WORD(1)])  # to read; into the nearest cache; data


class Vectors:
    """Generates operations on ``lanes`` float32 side by side; products and sums may become one instruction."""

    def __init__(self, builder: Any, lanes: int) -> None:
        self.builder, self.lanes = builder, lanes
        self.kind = ir.VectorType(ir.FloatType(), lanes)
        self.integers = ir.VectorType(_WORD, lanes)

    def _place(self, array: Any, offsets: tuple[Any, ...]) -> Any:
        index = offsets[0]
        for offset in offsets[1:]:
            index = self.builder.add(index, offset)
        return self.builder.bitcast(self.builder.gep(array, [index]), self.kind.as_pointer())

    def load(self, array: Any, *offsets: Any) -> Any:
        return self.builder.load(self._place(array, offsets), align=4)

    def store(self, value: Any, array: Any, *offsets: Any) -> None:
        self.builder.store(value, self._place(array, offsets), align=4)

    @contextmanager
    def pieces(self, width: Any) -> Iterator[Any]:
        """What is generated inside runs for every piece of ``lanes`` elements: the offset of its first."""
        lanes = ir.Constant(width.type, self.lanes)
        with cgutils.for_range(self.builder, self.builder.udiv(width, lanes)) as loop:
            yield self.builder.mul(loop.index, lanes)

    def times(self, a: Any, b: Any) -> Any:
        return self.builder.fmul(a, b, flags=("contract",))

    def plus(self, a: Any, b: Any) -> Any:
        return self.builder.fadd(a, b, flags=("contract",))

    def minus(self, a: Any, b: Any) -> Any:
        return self.builder.fsub(a, b, flags=("contract",))

    def constant(self, value: Any) -> Any:
        return ir.Constant(self.kind, [float(value)] * self.lanes)

    def splat(self, value: Any) -> Any:
        """A float or a 32-bit integer, in every lane."""
        undefined = ir.Constant(ir.VectorType(value.type, self.lanes), ir.Undefined)
        first = self.builder.insert_element(undefined, value, ir.Constant(_WORD, 0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(self.integers, [0] * self.lanes))

    def accumulator(self) -> Any:
        """Zeros, for ``accumulate`` and ``sum_of``."""
        return cgutils.alloca_once_value(self.builder, self.constant(0.0))

    def accumulate(self, total: Any, a: Any, b: Any) -> None:
        """``total += a * b``, lane by lane."""
        self.builder.store(self.plus(self.builder.load(total), self.times(a, b)), total)

    def sum_of(self, total: Any) -> Any:
        return self.folded(self.builder.load(total), self.plus)

    def folded(self, lanes: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """All lanes combined into one float."""
        width = self.lanes
        while width > 1:
            width //= 2
            upper = [width + place if place < width else 0 for place in range(self.lanes)]
            mask = ir.Constant(self.integers, upper)
            lanes = combine(self.builder.shuffle_vector(lanes, lanes, mask), lanes)
        return self.builder.extract_element(lanes, ir.Constant(_WORD, 0))
