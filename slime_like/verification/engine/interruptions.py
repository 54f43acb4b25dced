"""Responses that an action interrupts in their middle, and claims about the routes of a model with experts."""

import asyncio
import time
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import numpy as np

from slime_like.interfaces import Generation, PauseMode
from slime_like.verification.engine.subject import TOKENS, ClaimFailed, Subject

_ATTEMPTS = 12


def interrupted_requests(subject: Subject) -> Iterator[tuple[list[int], Generation]]:
    """Yield prompt and response of a request that a pause aborted, and of one that it froze."""
    engine = subject.engine

    async def paused(mode: PauseMode, prompt: list[int], delay_s: float) -> Generation:
        task, canceled = (asyncio.create_task(engine.engine.generate(subject.lasting(prompt))) for _ in range(2))
        await asyncio.sleep(delay_s)
        canceled.cancel()
        await engine.engine.pause(mode)
        await asyncio.sleep(delay_s)
        await engine.engine.resume()
        return (await task)[0]

    _measure(subject)
    for prompt in _prompts(subject):
        ended = engine.run(paused("abort", prompt, subject.halfway_s))
        if ended.finish_reason != "abort":
            subject.halfway_s /= 2
        elif len(ended.token_ids) < TOKENS:
            subject.halfway_s *= 1.5
        else:
            break
    else:
        after = f"at last after {subject.halfway_s:.3f} s"
        raise ClaimFailed(f"no request was aborted halfway in {_ATTEMPTS} attempts, {after}")
    yield prompt, ended
    whole = engine.run(paused("keep", prompt, subject.halfway_s))
    if whole.finish_reason == "abort":
        raise ClaimFailed("a frozen request next to a canceled one was aborted")
    yield prompt, whole


def update_while_generating(subject: Subject, pauses: bool) -> tuple[list[int], Generation, int]:
    """Update to the other weights amid a response, and switch the reference to them.

    Args:
        pauses: pause the engine for the update.

    Returns:
        Prompt and response, and the number of tokens that the old weights sampled.
    """
    engine = subject.engine

    async def scenario(prompt: list[int]) -> Generation:
        task = asyncio.create_task(engine.engine.generate(subject.lasting(prompt)))
        await asyncio.sleep(subject.halfway_s)
        if pauses:
            await engine.engine.pause("keep")
        await engine.update(subject.others)
        if pauses:
            await engine.engine.resume()
        return (await task)[0]

    _measure(subject)
    for prompt in _prompts(subject):
        version = engine.version
        generation = engine.run(scenario(prompt))
        subject.swap()
        versions = generation.weight_versions.tolist()
        before = versions.count(version)
        if TOKENS <= before <= len(versions) - TOKENS:
            if versions != [version] * before + [engine.version] * (len(versions) - before):
                raise ClaimFailed(f"tokens around update {engine.version} have the versions {sorted(set(versions))}")
            return prompt, generation, before
        subject.halfway_s *= 1.5 if before < TOKENS else 0.5
    raise ClaimFailed("no update came in the middle of a response")


def _prompts(subject: Subject) -> Iterator[list[int]]:
    return islice(cycle(subject.prompts), _ATTEMPTS)


def _measure(subject: Subject) -> None:
    """Measure ``halfway_s`` once, with a response that nothing interrupts."""
    if not subject.halfway_s:
        started = time.monotonic()
        subject.engine.run(subject.engine.engine.generate(subject.lasting(subject.prompts[0])))
        subject.halfway_s = (time.monotonic() - started) / 2


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
    found += interrupted_requests(subject)
    wrong = [_wrong(each, subject.reference.routes(prompt, each.token_ids)) for prompt, each in found]
    return _bounded(subject, np.concatenate(wrong))


def routes_amid_update(subject: Subject) -> float | None:
    """After an update amid a response, tokens that the old weights read keep their routes."""
    if not subject.routed:
        return None
    prompt, generation, before = update_while_generating(subject, pauses=False)
    new = subject.reference.routes(prompt, generation.token_ids)
    subject.swap()
    old = subject.reference.routes(prompt, generation.token_ids)
    subject.swap()
    read = len(prompt) + before - 1
    return _bounded(subject, _wrong(generation, np.concatenate((old[:read], new[read:]))))


def _wrong(generation: Generation, expected: np.ndarray) -> np.ndarray:
    found = generation.fields.get("routes", np.empty(0))
    if found.dtype != np.int16 or found.shape != expected.shape:
        raise ClaimFailed(f"routes are {found.dtype} {found.shape}, not int16 {expected.shape}")
    return (np.sort(found) != np.sort(expected)).any(-1)


def _bounded(subject: Subject, wrong: np.ndarray) -> float:
    share, bound = float(wrong.mean()), _DIFFERING[subject.reference.dtype]
    if share > bound:
        raise ClaimFailed(f"{share:.1%} of the routers' choices differ (bound {bound:.0%})")
    return share
