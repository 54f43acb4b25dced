"""Responses that an action interrupts in their middle."""

import asyncio
from collections.abc import Iterator

from slime_like.interfaces import Generation, PauseMode
from slime_like.verification.engine.subject import TOKENS, Refuted, Subject

_HALFWAY_S = (0.1, 0.02, 0.005, 0.002, 0.05, 0.01, 0.2, 0.4, 0.8, 1.6)


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

    for prompt, delay_s in _attempts(subject):
        ended = engine.run(paused("abort", prompt, delay_s))
        if ended.finish_reason == "abort" and len(ended.token_ids) >= TOKENS:
            break
    else:
        raise Refuted(f"no request was aborted halfway, {min(_HALFWAY_S)} to {max(_HALFWAY_S)} s after its start")
    yield prompt, ended
    whole = engine.run(paused("keep", prompt, delay_s))
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

    async def scenario(prompt: list[int], delay_s: float) -> Generation:
        task = asyncio.create_task(engine.engine.generate(subject.lasting(prompt)))
        await asyncio.sleep(delay_s)
        if pauses:
            await engine.engine.pause("keep")
        await engine.update(subject.others)
        if pauses:
            await engine.engine.resume()
        return (await task)[0]

    for prompt, delay_s in _attempts(subject):
        version = engine.version
        generation = engine.run(scenario(prompt, delay_s))
        subject.swap()
        versions = generation.weight_versions.tolist()
        before = versions.count(version)
        if TOKENS <= before <= len(versions) - TOKENS:
            if versions != [version] * before + [engine.version] * (len(versions) - before):
                raise Refuted(f"tokens around update {engine.version} have the versions {sorted(set(versions))}")
            return prompt, generation, before
    raise Refuted("no update came in the middle of a response")


def _attempts(subject: Subject) -> Iterator[tuple[list[int], float]]:
    """Return prompts and delays. On a machine of any speed, one of the delays ends in the middle of a response."""
    return ((prompt, delay_s) for delay_s in _HALFWAY_S for prompt in subject.prompts)
