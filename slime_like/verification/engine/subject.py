"""An engine with the weights that it ought to serve, for claims about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from slime_like.interfaces import Generation, GenerationRequest
from slime_like.verification.engine.driven import DrivenEngine
from slime_like.verification.engine.reference import Reference

COLD = 0.05
"""The temperature of long responses: they rarely meet their stop token."""
_LONG = 200
"""Tokens of a response that can be caught in the middle."""


class Refuted(Exception):
    """An engine does not hold a claim; the message says what was found."""


@dataclass(slots=True)
class Subject:
    """An engine, the weights that it ought to serve, and what it is asked.

    Attributes:
        others: other weights of the same model.
    """

    engine: DrivenEngine
    reference: Reference
    others: dict[str, Tensor]
    prompts: Sequence[list[int]]

    def gap(self, prompt: list[int], generation: Generation, temperature: float) -> float:
        """``Reference.gap`` of the sampled tokens."""
        expected = self.reference.logprobs(prompt, generation.token_ids, temperature)
        return self.reference.gap(generation.logprobs, expected, temperature)

    def load(self, weights: dict[str, Tensor]) -> None:
        """Update all weights of the engine, and expect these from now on."""
        receipt, sent = self.engine.run(self.engine.update(weights))
        if receipt.checksums != sent:
            raise Refuted("the hashes of the received tensors differ from the hashes of the sent ones")
        self.reference.use(weights)

    def swap(self) -> None:
        """Expect the other weights from now on."""
        before = dict(self.reference.weights)
        self.reference.use(self.others)
        self.others = before

    @property
    def last_id(self) -> tuple[int]:
        """The vocabulary's last id: as the only stop token it hardly ever ends a response."""
        return (self.reference.vocab_size - 1,)

    def lasting(self, prompt: list[int]) -> GenerationRequest:
        """Return a request for a long response."""
        return self.engine.request(prompt, max_new_tokens=_LONG, temperature=COLD, stop_token_ids=self.last_id)

    def probe(self, where: np.ndarray | None = None) -> float:
        """The largest ``Reference.gap`` of the prompts' tokens ``where`` this is true, of the others, and of some that
        are sampled behind each prompt."""
        options: dict[str, Any] = {"max_new_tokens": 4, "prompt_logprobs": True, "seed": 1}
        requests = [self.engine.request(prompt, **options) for prompt in self.prompts]
        parts: list[tuple[np.ndarray, ...]] = []
        for prompt, (generation,) in zip(self.prompts, self.engine.generate_all(requests), strict=True):
            ids = np.concatenate((prompt[1:], generation.token_ids)).astype(np.int64)
            expected = self.reference.logprobs(prompt[:1], ids, 1.0)
            assert generation.prompt_logprobs is not None  # asked for
            parts.append((generation.prompt_logprobs, generation.logprobs, *np.split(expected, [len(prompt) - 1])))
        found, sampled, expected, after = (np.concatenate(part) for part in zip(*parts, strict=True))
        some = np.ones(len(found), bool) if where is None else where
        pairs = [(found[some], expected[some]), (found[~some], expected[~some]), (sampled, after)]
        return max(self.reference.gap(*pair) for pair in pairs if len(pair[0]))
