"""Claims about routes, for an engine that returns them, and a model with experts."""

from typing import Any

import numpy as np

from slime_like.interfaces import Generation
from slime_like.verification.engine.interruptions import interrupted, updated_amid
from slime_like.verification.engine.subject import TOKENS, Refuted, Subject

_DIFFERING = {"float32": 0.0, "bfloat16": 0.1}
"""Bound on the share of choices that differ, by the engine's precision."""


def routes(subject: Subject) -> float | None:
    """Routes are the experts that routers choose, for every token that was read: of prompts, also with a prefix of
    another request, of several samples of a prompt, and after an abort or a pause."""
    if not subject.routed:
        return None
    found = []
    for prompts in (subject.prompts, [[*prompt, 5, 6] for prompt in subject.prompts]):
        options: dict[str, Any] = {"max_new_tokens": TOKENS, "num_samples": 2, "ignore_eos": True}
        answers = subject.engine.generate_all([subject.engine.request(prompt, **options) for prompt in prompts])
        found += [(prompt, each) for prompt, answer in zip(prompts, answers, strict=True) for each in answer]
    found += interrupted(subject)
    wrong = [_wrong(each, subject.reference.routes(prompt, each.token_ids)) for prompt, each in found]
    return _bounded(subject, np.concatenate(wrong))


def routes_amid_update(subject: Subject) -> float | None:
    """After an update amid a response, tokens that the old weights read keep their routes."""
    if not subject.routed:
        return None
    prompt, generation, before = updated_amid(subject, pauses=False)
    new = subject.reference.routes(prompt, generation.token_ids)
    subject.swap()
    old = subject.reference.routes(prompt, generation.token_ids)
    subject.swap()
    read = len(prompt) + before - 1
    return _bounded(subject, _wrong(generation, np.concatenate((old[:read], new[read:]))))


def _wrong(generation: Generation, expected: np.ndarray) -> np.ndarray:
    found = generation.fields.get("routes", np.empty(0))
    if found.dtype != np.int16 or found.shape != expected.shape:
        raise Refuted(f"routes are {found.dtype} {found.shape}, not int16 {expected.shape}")
    return (np.sort(found) != np.sort(expected)).any(-1)


def _bounded(subject: Subject, wrong: np.ndarray) -> float:
    share, bound = float(wrong.mean()), _DIFFERING[subject.reference.dtype]
    if share > bound:
        raise Refuted(f"{share:.1%} of the routers' choices differ (bound {bound:.0%})")
    return share
