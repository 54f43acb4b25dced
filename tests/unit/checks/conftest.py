"""Every check of a configuration asks which arguments vLLM has."""

from collections.abc import Iterator
from functools import cache

import pytest

from slime_like.checks import engine_arguments


@pytest.fixture(scope="session", autouse=True)
def _vllm_is_read_once() -> Iterator[None]:
    """Parsing its source takes most of a check's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_arguments, "_vllm_arguments", cache(engine_arguments._vllm_arguments))
        yield
