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
    pairs = [(_routes(subject, *one), subject.reference.routes(one[0], one[1].token_ids)) for one in found]
    return _alike(subject, *(np.concatenate(side) for side in zip(*pairs, strict=True)))


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
    return _alike(subject, _routes(subject, prompt, generation), np.concatenate((old[:read], new[read:])))


def _routes(subject: Subject, prompt: list[int], generation: Generation) -> np.ndarray:
    found, read = generation.fields.get("routes"), len(prompt) + len(generation.token_ids) - 1
    if found is None or found.dtype != np.int16 or len(found) != read:
        what = "none" if found is None else f"{found.dtype} {found.shape}"
        raise Refuted(f"the routes of {read} tokens are {what}")
    return found


def _alike(subject: Subject, found: np.ndarray, expected: np.ndarray) -> float:
    """Return the share of choices that differ, in any order."""
    if found.shape != expected.shape:
        raise Refuted(f"routes have the shape {found.shape}, not {expected.shape}")
    share = float((np.sort(found) != np.sort(expected)).any(-1).mean())
    if share > (bound := _DIFFERING[subject.reference.dtype]):
        raise Refuted(f"{share:.1%} of the routers' choices differ (bound {bound:.0%})")
    return share
