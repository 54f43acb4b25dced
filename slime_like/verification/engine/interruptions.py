"""Responses that an action interrupts in their middle."""

import asyncio
import time
from collections.abc import Iterator
from itertools import cycle, islice

from slime_like.interfaces import Generation, PauseMode
from slime_like.verification.engine.subject import TOKENS, Refuted, Subject

_ATTEMPTS = 12


def interrupted(subject: Subject) -> Iterator[tuple[list[int], Generation]]:
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
        raise Refuted(f"no request was aborted halfway in {_ATTEMPTS} attempts, {after}")
    yield prompt, ended
    whole = engine.run(paused("keep", prompt, subject.halfway_s))
    if whole.finish_reason == "abort":
        raise Refuted("a frozen request next to a canceled one was aborted")
    yield prompt, whole


def updated_amid(subject: Subject, pauses: bool) -> tuple[list[int], Generation, int]:
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
                raise Refuted(f"tokens around update {engine.version} have the versions {sorted(set(versions))}")
            return prompt, generation, before
        subject.halfway_s *= 1.5 if before < TOKENS else 0.5
    raise Refuted("no update came in the middle of a response")


def _prompts(subject: Subject) -> Iterator[list[int]]:
    return islice(cycle(subject.prompts), _ATTEMPTS)


def _measure(subject: Subject) -> None:
    """Measure ``halfway_s`` once, with a response that nothing interrupts."""
    if not subject.halfway_s:
        started = time.monotonic()
        subject.engine.run(subject.engine.engine.generate(subject.lasting(subject.prompts[0])))
        subject.halfway_s = (time.monotonic() - started) / 2
