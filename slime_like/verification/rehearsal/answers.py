"""The rows' answers, tried as responses and looked at beside their prompts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal

from slime_like.checks.own_answers import OwnAnswer, score_own_answers
from slime_like.checks.rows import answered_samples, samples_of
from slime_like.config import DataConfig, RunConfig
from slime_like.config.rollout import RewardFunction
from slime_like.errors import SlimeLikeError
from slime_like.orchestration.rollout.failures import failure_text
from slime_like.sandbox.rewards.pool import RewardItem, RewardPool
from slime_like.sandbox.rewards.registry import REGISTERED, SERVICES, accepts_answers
from slime_like.system.words import counted
from slime_like.verification.rehearsal.finding import Finding, listed

_ANSWERS = 32
_ANSWERS_OF_SOURCE = 16
_SHOWN_CHARS = 60
_LONG_CHARS = 40
"""An answer that a prompt holds by chance, as a choice or a name, is shorter."""


def answer_findings(config: RunConfig) -> Iterator[Finding]:
    """The first rows' own answers as responses, through the reward functions."""
    names = [function.name for function in config.reward.functions]
    if SERVICES & set(names) or all(function.is_given for function in config.reward.functions):
        yield Finding("note", "rewards", "services, environments and agents are tried in the small run alone")
        return
    yield from _alike(config)
    samples = _first_samples(config)
    try:
        with RewardPool(config.reward) as pool:
            answers = score_own_answers(pool, [sample for of_source in samples.values() for sample in of_source])
            of_strangers = pool.score(list(_with_another_answer(answers)))
    except SlimeLikeError as error:
        yield Finding("FOUND", "rewards", listed(error))
        return
    failed = [own.outcome.metadata for own in answers if own.has_failed]
    if failed:
        yield Finding("FOUND", "rewards", f"scoring failed for {len(failed)} own answers ({failure_text(failed)})")
    left = iter(answers)
    for source, of_source in samples.items():
        yield _successes(config.reward.functions[0], list(islice(left, len(of_source))), source)
    is_any_right = any(own.is_success for own in answers)
    if is_any_right and [own.outcome.rewards for own in answers] == [outcome.rewards for outcome in of_strangers]:
        text = f"another row's answer gets the same reward as a row's own, in each of {len(answers)} rows"
        yield Finding("note", "rewards", f"{text}: no reward depends on the answer")


def _first_samples(config: RunConfig) -> dict[str, list[RewardItem]]:
    """By source of the mixture: one may be right where another's key or format is wrong."""
    if not config.data.mixture:
        return {"the data": list(islice(answered_samples(config), _ANSWERS))}
    return {source: list(islice(samples_of(part), _ANSWERS_OF_SOURCE)) for source, part in _sources(config).items()}


def _sources(config: RunConfig) -> dict[str, DataConfig]:
    names = [f"source {source.name}" for source in config.data.mixture] or ["the data"]
    return dict(zip(names, config.data.parts, strict=True))


def _successes(function: RewardFunction, answers: Sequence[OwnAnswer], source: str) -> Finding:
    """How many rows' own answers the first reward function counts as successes."""
    wrong = [own.item.answer for own in answers if not own.is_success]
    right = len(answers) - len(wrong)
    text = f"{right} of {counted(len(answers), 'own answer')} of {source} are successes of {function.name}"
    if function.name in REGISTERED and not accepts_answers(function):
        scored = f"{counted(len(answers), 'row')} of {source} scored; {function.name} takes no bare answer"
        return Finding("ok", "rewards", scored)
    if not wrong:
        return Finding("ok", "rewards", text)
    example = f"e.g. {wrong[0][:_SHOWN_CHARS]!r}"
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


def _alike(config: RunConfig) -> Iterator[Finding]:
    """Rows that are right in form, and still no task or no measure: empty or equal answers, answers that are asked,
    trained held-out rows."""
    rows: list[RewardItem] = []
    for source, part in _sources(config).items():
        of_source = list(samples_of(part))
        yield from asked_answers(of_source, source)
        rows += of_source
    answers = Counter(sample.answer.strip() for sample in rows)
    if empty := answers.pop("", 0):
        yield Finding("note", "answers", f"{counted(empty, 'row')} of {empty + answers.total()} have an empty answer")
    if len(answers) == 1 and answers.total() > 1:
        yield Finding("note", "answers", f"all {answers.total()} answers are {next(iter(answers))!r:.60}")
    prompts = {sample.prompt for sample in rows}
    if known := sum(sample.prompt in prompts for sample in islice(answered_samples(config), len(rows), None)):
        yield Finding("note", "held-out rows", f"{counted(known, 'prompt')} of them stand in the training data too")


def asked_answers(rows: Sequence[RewardItem], source: str) -> Iterator[Finding]:
    """Answers that their prompts hold: with a wrong key, each answer is right by itself."""
    texts = [(row.answer.strip(), row.prompt.strip()) for row in rows]
    equal = [answer for answer, prompt in texts if answer and answer == prompt]
    held = [answer for answer, prompt in texts if len(answer) >= _LONG_CHARS and answer in prompt and answer != prompt]
    share = f"of {counted(len(rows), 'answer')} of {source}"
    if equal:
        text = f"{len(equal)} {share} equal their prompt, e.g. {equal[0][:_SHOWN_CHARS]!r}"
        kind: Literal["FOUND", "note"] = "FOUND" if len(equal) == len(rows) else "note"
        yield Finding(kind, "answers", f"{text}; set data.answer_key or data.format")
    if held:
        text = f"{len(held)} {share} stand in their prompt word by word, e.g. {held[0][:_SHOWN_CHARS]!r}"
        yield Finding("note", "answers", f"{text}: is data.answer_key right?")
