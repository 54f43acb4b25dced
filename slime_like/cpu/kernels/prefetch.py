"""Asking for memory before it is read: what is in no near cache comes while something else is computed."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import uint64, void
from numba.core import cgutils
from numba.extending import intrinsic

LINE = np.uint64(16)
"""Elements of float32 in 64 bytes, a cache line of x86 and most ARM processors."""


@intrinsic
def prefetch(_: Any, array: Any, index: Any) -> Any:
    """``prefetch(array, index)`` inside a kernel: the cache line of the element that many elements from the beginning.

    A hint, which changes no result; an address that is none is ignored.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        builder.call(function, [address, word(0), word(3), word(1)])  # to read; into the nearest cache; data
        return context.get_dummy_value()

    return void(array, uint64), generate
