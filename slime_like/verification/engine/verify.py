"""Verification of every claim for one engine."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slime_like.config import RunConfig
from slime_like.errors import SlimeLikeError
from slime_like.interfaces import load_engine
from slime_like.models.dimensions import ModelDimensions
from slime_like.verification.engine.claims import CLAIMS, Claim
from slime_like.verification.engine.subject import ClaimFailed, DrivenEngine, Reference, Subject, started

_PROMPTS = 8
LONGEST_PROMPT, LONGEST_RESPONSE = 64, 256
"""Maximum tokens of the engine's prompts and responses."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one claim.

    Attributes:
        claim: the claim as a sentence.
        gap: ``Reference.gap``; ``None`` if the claim does not measure one.
        problem: why the claim does not hold; ``None`` if it does.
    """

    claim: str
    gap: float | None
    seconds: float
    problem: str | None = None


def verify_engine(config: RunConfig) -> Iterator[Verdict]:
    """Check each claim in turn on one engine of ``config`` in this process.

    Args:
        config: configuration of the engine, with a small model in one file.

    Raises ``SlimeLikeError`` if the engine does not start.
    """
    kind = load_engine(config.rollout.engine)
    dimensions = ModelDimensions.from_checkpoint(config.model.path)
    routed = dimensions.num_experts > 0 and getattr(kind, "returns_routes", False)
    if routed:
        algorithm = config.algorithm.model_copy(update={"routing_replay": "rollout"})
        config = config.model_copy(update={"algorithm": algorithm})
    engine = kind(config, 0)
    with started(engine) as loop:
        driven = DrivenEngine(engine, loop)
        try:
            reference = Reference(config.model.path, config.model.dtype)
            subject = Subject(driven, reference, _others(reference.weights), _prompts(config.model.path), routed)
            yield from (_tried(claim, subject) for claim in CLAIMS)
        finally:
            driven.close()


def _tried(claim: Claim, subject: Subject) -> Verdict:
    sentence = " ".join((claim.__doc__ or "").split())
    began, gap, problem = time.monotonic(), None, None
    try:
        gap = claim(subject)
    except ClaimFailed as refuted:
        problem = str(refuted)
    except (SlimeLikeError, TimeoutError) as error:  # other claims may still hold
        problem = f"{type(error).__name__}: {error}"
    return Verdict(sentence, gap, time.monotonic() - began, problem)


def _others(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with noise of half their standard deviation."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: tensor + (torch.randn(tensor.shape, generator=generator) * tensor.std(correction=0) / 2).to(tensor.dtype)
        for name, tensor in weights.items()
    }


def _prompts(model: Path) -> list[list[int]]:
    generator = np.random.default_rng(0)
    vocabulary = ModelDimensions.from_checkpoint(model).vocab_size
    lengths = generator.integers(8, LONGEST_PROMPT, _PROMPTS)
    return [generator.integers(0, vocabulary, length).tolist() for length in lengths]
