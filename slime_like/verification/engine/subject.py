"""An engine under verification, with the weights that it should serve."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from slime_like.interfaces import Generation, GenerationRequest
from slime_like.verification.engine.driven import DrivenEngine
from slime_like.verification.engine.reference import Reference

COLD = 0.05
"""Temperature of long responses, so they rarely contain their stop token."""
TOKENS = 16
"""Tokens of a response, or of a subset with its own gap. A smaller subset would have a random median, and a larger one
would include tokens that an expert does not affect."""
_LONG = 200
"""Tokens of a response that lasts long enough for an action in its middle."""


class Refuted(Exception):
    """Error of an engine that does not satisfy a claim; the message describes what was found."""


@dataclass(slots=True)
class Subject:
    """An engine, the weights that it should serve, and its prompts.

    Attributes:
        others: different weights for the same model.
        routed: the engine records the routes of experts.
        halfway_s: seconds until the middle of a lasting response, as measured and corrected by every attempt to
            interrupt one; 0 before.
    """

    engine: DrivenEngine
    reference: Reference
    others: dict[str, Tensor]
    prompts: Sequence[list[int]]
    routed: bool = False
    halfway_s: float = 0.0

    def gap(self, prompt: list[int], generation: Generation, temperature: float) -> float:
        expected = self.reference.logprobs(prompt, generation.token_ids, temperature)
        return self.reference.gap(generation.logprobs, expected, temperature)

    def load(self, weights: dict[str, Tensor]) -> None:
        receipt, sent = self.engine.run(self.engine.update(weights))
        if receipt.checksums != sent:
            raise Refuted("the hashes of the received tensors differ from those of the sent tensors")
        self.reference.use(weights)

    def swap(self) -> None:
        before = dict(self.reference.weights)
        self.reference.use(self.others)
        self.others = before

    def lasting(self, prompt: list[int]) -> GenerationRequest:
        return self.engine.request(prompt, max_new_tokens=_LONG, temperature=COLD, ignore_eos=True)

    def probe(self, where: np.ndarray | None = None) -> float:
        """Return the largest ``Reference.gap`` of three sets: prompts' tokens in the mask ``where``, other tokens of
        prompts, and a few tokens sampled after each prompt."""
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
