"""Every claim tried on one engine."""

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
from slime_like.verification.engine.driven import DrivenEngine, started
from slime_like.verification.engine.reference import Reference
from slime_like.verification.engine.subject import Refuted, Subject

_PROMPTS = 8
LONGEST_PROMPT, LONGEST_RESPONSE = 64, 256
"""Tokens that the engine must take."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One claim's line.

    Attributes:
        claim: a sentence.
        gap: ``Reference.gap``; ``None`` where none was measured.
        problem: how it was refuted; ``None`` if it holds.
    """

    claim: str
    gap: float | None
    seconds: float
    problem: str | None = None


def verify_engine(config: RunConfig) -> Iterator[Verdict]:
    """Try each claim on the engine of ``config``, one after the other on the same engine, in this process.

    Args:
        config: its model is a small one, in one file.

    Raises:
        SlimeLikeError: the engine does not start.
    """
    engine = load_engine(config.rollout.engine)(config, 0)
    with started(engine) as loop:
        driven = DrivenEngine(engine, loop)
        try:
            reference = Reference(config.model.path, config.model.dtype)
            subject = Subject(driven, reference, _others(reference.weights), _prompts(config.model.path))
            yield from (_tried(claim, subject) for claim in CLAIMS)
        finally:
            driven.close()


def _tried(claim: Claim, subject: Subject) -> Verdict:
    sentence = " ".join((claim.__doc__ or "").split())
    began, gap, problem = time.monotonic(), None, None
    try:
        gap = claim(subject)
    except Refuted as refuted:
        problem = str(refuted)
    except (SlimeLikeError, TimeoutError) as error:  # it does not hold the claim, and may hold others
        problem = f"{type(error).__name__}: {error}"
    return Verdict(sentence, gap, time.monotonic() - began, problem)


def _others(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with noise of half their spread."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: tensor + (torch.randn(tensor.shape, generator=generator) * tensor.std(correction=0) / 2).to(tensor.dtype)
        for name, tensor in weights.items()
    }


def _prompts(model: Path) -> list[list[int]]:
    """Token ids of the whole vocabulary, 8 to 63 of them."""
    generator = np.random.default_rng(0)
    vocabulary = ModelDimensions.from_checkpoint(model).vocab_size
    lengths = generator.integers(8, LONGEST_PROMPT, _PROMPTS)
    return [generator.integers(0, vocabulary, length).tolist() for length in lengths]
