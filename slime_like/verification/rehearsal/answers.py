"""The rows' answers, tried as responses."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from slime_like.checks.own_answers import OwnAnswer, has_failed, own_answers_by_source
from slime_like.checks.rows import first_samples
from slime_like.config import RunConfig
from slime_like.config.rollout import RewardFunction
from slime_like.errors import SlimeLikeError
from slime_like.orchestration.rollout.failures import failure_text
from slime_like.sandbox.rewards.pool import RewardItem, RewardOutcome, RewardPool
from slime_like.sandbox.rewards.registry import REGISTERED, SERVICES, accepts_answers
from slime_like.system.words import counted
from slime_like.verification.rehearsal.finding import Finding, listed
from slime_like.verification.rehearsal.rows import SHOWN_CHARS

_ANSWERS = 32
_ANSWERS_OF_SOURCE = 16
_EMPTY_PROGRAM = "```python\npass\n```"
_SLOW_STEP_S = 60.0
"""Of scoring, in a step."""


def answer_findings(config: RunConfig) -> Iterator[Finding]:
    """The first rows' own answers as responses, through the reward functions."""
    names = [function.name for function in config.reward.functions]
    if SERVICES & set(names) or all(function.is_given for function in config.reward.functions):
        yield Finding("note", "rewards", "services, environments and agents are tried in the small run alone")
        return
    samples = first_samples(config, _ANSWERS, _ANSWERS_OF_SOURCE)
    try:
        with RewardPool(config.reward) as pool:
            pool.start()
            by_source = own_answers_by_source(pool, samples)
            answers = [own for _, of_source in by_source for own in of_source]
            begun = time.monotonic()
            again = pool.score([own.with_response(own.item.answer) for own in answers])
            seconds = time.monotonic() - begun
            of_strangers = pool.score(list(_with_another_answer(answers)))
            nothing = _EMPTY_PROGRAM if names[0] == "code" else ""
            of_silence = pool.score([replace(own.item, response=nothing) for own in answers])
    except SlimeLikeError as error:
        yield Finding("FOUND", "rewards", listed(error))
        return
    tried = [*(own.outcome for own in answers), *again]
    failed = [outcome.metadata for outcome in tried if has_failed(outcome)]
    if failed:
        text = f"scoring failed for {len(failed)} of {counted(len(tried), 'own answer')}"
        yield Finding("FOUND", "rewards", f"{text} ({failure_text(failed)})")
    for source, of_source in by_source:
        yield _successes(config.reward.functions[0], of_source, source)
    yield from _inconstant(answers, again)
    if names[0] == "code" and (passed := sum(outcome.successes[0] > 0 for outcome in of_silence)):
        text = f"the tests of {passed} of {counted(len(answers), 'row')} pass for an empty program"
        yield Finding("FOUND", "rewards", f"{text}; let them call what they test")
    if any(own.is_success for own in answers) and not _takes_no_answer(config.reward.functions[0]):
        yield from _independent(config, answers, of_strangers, of_silence)
    yield from _slow(config, seconds / max(1, len(answers)))


def _inconstant(answers: Sequence[OwnAnswer], again: Sequence[RewardOutcome]) -> Iterator[Finding]:
    pairs = [(own.outcome, other) for own, other in zip(answers, again, strict=True)]
    sound = [(first, second) for first, second in pairs if not (has_failed(first) or has_failed(second))]
    if changed := sum(first.rewards != second.rewards for first, second in sound):
        text = f"{changed} of {counted(len(sound), 'response')} got another reward when scored a second time"
        yield Finding("FOUND", "rewards", f"{text}; let it depend on prompt, response and answer alone")


def _independent(
    config: RunConfig,
    answers: Sequence[OwnAnswer],
    of_strangers: Sequence[RewardOutcome],
    of_silence: Sequence[RewardOutcome],
) -> Iterator[Finding]:
    """Rewards that another answer, or none, earns too."""
    weights = [function.weight for function in config.reward.computed]
    own = [_total(each.outcome, weights) for each in answers]
    others = [_total(each, weights) for each in of_strangers]
    meant = "is that meant? Look at the function, and at data.answer_key"
    if others and all(other > said for other, said in zip(others, own, strict=True)):
        text = f"another row's answer gets a higher reward than a row's own, in each of {len(answers)} rows"
        yield Finding("FOUND", "rewards", f"{text}; look at the weights in reward.functions, and at custom functions")
    if own == others:
        text = f"another row's answer gets the same reward as a row's own, in each of {len(answers)} rows"
        yield Finding("note", "rewards", f"{text}: no reward depends on the answer; {meant}")
    if all(silent >= said for silent, said in zip((_total(each, weights) for each in of_silence), own, strict=True)):
        text = f"an empty response gets no lower reward than a row's own answer, in each of {len(answers)} rows"
        yield Finding("note", "rewards", f"{text}; {meant}")


def _total(outcome: RewardOutcome, weights: Sequence[float]) -> float:
    return sum(weight * reward for weight, reward in zip(weights, outcome.rewards, strict=True))


def _slow(config: RunConfig, seconds: float) -> Iterator[Finding]:
    responses = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    if (step := seconds * responses) > _SLOW_STEP_S:
        text = f"scoring takes {seconds:.2g} s a response with {counted(config.reward.workers, 'worker')}"
        yield Finding("note", "rewards", f"{text}: {step:.0f} s for a step's {responses}; raise reward.workers")


def _takes_no_answer(function: RewardFunction) -> bool:
    return function.name in REGISTERED and not accepts_answers(function)


def _successes(function: RewardFunction, answers: Sequence[OwnAnswer], source: str) -> Finding:
    """How many rows' own answers the first reward function counts as successes."""
    wrong = [own.item.answer for own in answers if not own.is_success]
    right = len(answers) - len(wrong)
    text = f"{right} of {counted(len(answers), 'own answer')} of {source} are successes of {function.name}"
    if _takes_no_answer(function):
        scored = f"{counted(len(answers), 'row')} of {source} scored; {function.name} takes no bare answer"
        return Finding("ok", "rewards", scored)
    if forms := sorted({"...".join(own.form) for own in answers if own.is_success and any(own.form)}):
        text += f" (some only as {' or '.join(forms)})"
    if not wrong:
        return Finding("ok", "rewards", text)
    example = f"e.g. {wrong[0][:SHOWN_CHARS]!r}"
    if right:
        return Finding("note", "rewards", f"{text}; the others are not, {example}")
    if accepts_answers(function):
        cause = "no response can succeed; set data.answer_key or data.format"
        return Finding("FOUND", "rewards", f"{text}, {example}: {cause}")
    doubt = "is that meant? A function that needs more than the answer may be right"
    return Finding("note", "rewards", f"{text}, {example}: {doubt}")


def _with_another_answer(answers: Sequence[OwnAnswer]) -> Iterator[RewardItem]:
    """Each row with the answer of another row as the response; none where all answers are alike."""
    for own in answers:
        others = (each.item.answer for each in answers if each.item.answer.strip() != own.item.answer.strip())
        yield from map(own.with_response, islice(others, 1))
