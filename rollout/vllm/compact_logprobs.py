"""vLLM's container for a response's logprobs, with machine numbers instead of Python objects."""

from array import array
from collections.abc import Iterable, Iterator

from vllm.logprobs import FlatLogprobs
from vllm.v1.engine import logprobs as of_engine

from slime_like.errors import EngineError

_MADE_BY = "create_sample_logprobs"


class CompactLogprobs(FlatLogprobs):
    """Container with a tenth of the memory: the supports of ``top_k`` 512 would take about 50 KB per token.

    Leaves out ranks and texts, which are not used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.token_ids = array("i")
        self.logprobs = array("f")

    def append_fast(
        self, token_ids: list[int], logprobs: list[float], ranks: Iterator[int], decoded_tokens: Iterable[str | None]
    ) -> None:
        """Append one position. ``ranks`` has as many entries as this request asked for; the batch may have more."""
        count = sum(1 for _ in ranks)
        self.start_indices.append(len(self.logprobs))
        self.token_ids.extend(token_ids[:count])
        self.logprobs.extend(logprobs[:count])
        self.end_indices.append(len(self.logprobs))


def use_compact_logprobs() -> None:
    """Use this container for all flat logprobs in this process. Raises ``EngineError`` if vLLM has changed."""
    if not hasattr(of_engine, _MADE_BY):
        problem = f"vllm.v1.engine.logprobs has no {_MADE_BY}"
        raise EngineError(problem, code="engine-version", remedy="its version is not supported")
    setattr(of_engine, _MADE_BY, lambda is_flat: CompactLogprobs() if is_flat else [])
