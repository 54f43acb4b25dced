"""A Megatron-core trainer. Importing any module here imports Megatron-core, with deferred compilation."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def defer_compile() -> Iterator[None]:
    """Inside, compile functions decorated with ``torch.compile`` on their first call.

    Megatron-core decorates functions on import, and ``torch.compile`` loads the compiler immediately. This takes 2 of
    the 6 CPU seconds of a rank's imports, for functions that a CPU never calls.
    """
    compile_now: Callable[..., Any] = torch.compile

    def compile_later(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        if function is None:
            return functools.partial(compile_later, **options)
        compiled = functools.cache(lambda: compile_now(function, **options))

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            return compiled()(*arguments, **named)

        return call

    torch.compile = compile_later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_now


with defer_compile():
    import megatron.core  # noqa: F401
