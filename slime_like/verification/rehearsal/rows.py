"""The rows of a recipe, looked at: what is right in form, and still no task, no measure, or no answer."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from slime_like.checks.rows import samples_of, sources_of
from slime_like.config import RunConfig
from slime_like.sandbox.rewards.pool import RewardItem
from slime_like.sandbox.rewards.registry import accepts_answers
from slime_like.system.latex import boxed
from slime_like.system.words import counted
from slime_like.verification.rehearsal.finding import Finding

SHOWN_CHARS = 60
"""Of an answer."""
_LONG_CHARS = 40
"""An answer that a prompt holds by chance, as a choice or a name, is shorter."""
_REPEATED = 0.1
"""Share of rows whose prompt stands in another one above which that is noted."""
_MEASURED = 1000
"""Answers whose tokens are counted."""
_COMMAND, _WORDS = re.compile(r"\\[A-Za-z]+"), re.compile(r"(?:\b[A-Za-z]{2,}\b\W+){3,}")


def row_findings(config: RunConfig, tokenizer: Any) -> Iterator[Finding]:
    """Of all rows: empty or equal answers, answers that are asked or whole solutions, repeated prompts."""
    rows: list[RewardItem] = []
    for source, part in sources_of(config):
        of_source = list(samples_of(part))
        yield from asked_answers(of_source, source)
        yield from _whole_solutions(config, of_source, source)
        yield from _too_long(config, tokenizer, of_source, source)
        rows += of_source
    answers = Counter(sample.answer.strip() for sample in rows)
    if empty := answers.pop("", 0):
        yield Finding(
            "note", "answers", f"{counted(empty, 'row')} of {empty + answers.total()} have an empty answer; remove them"
        )
    if len(answers) == 1 and answers.total() > 1:
        yield Finding("note", "answers", f"all {answers.total()} answers are {next(iter(answers))!r:.60}")
    if answers and config.reward.functions[0].name in ("math_verify", "gsm8k") and all(map(_is_letter, answers)):
        text = "all answers are letters, which multiple_choice finds in a response"
        yield Finding("note", "answers", f"{text}; set reward.functions")
    yield from _prompts(rows, has_bare_answers=accepts_answers(config.reward.functions[0]))


def _prompts(rows: Sequence[RewardItem], has_bare_answers: bool) -> Iterator[Finding]:
    """Solutions, or tasks with their settings, may differ where the answer does not."""
    answers = defaultdict[str, set[str]](set)
    for row in rows:
        answers[row.prompt].add(row.answer.strip())
    if len(answers) == 1 and len(rows) > 1:
        shown = f"all {len(rows)} prompts are {next(iter(answers))[:SHOWN_CHARS]!r}"
        yield Finding("note", "prompts", f"{shown}; is data.prompt_key right?")
        return
    if has_bare_answers and (several := sum(len(each) > 1 for each in answers.values())):
        yield Finding(
            "note",
            "prompts",
            f"{counted(several, 'prompt')} stand in several rows, with different answers; keep one of each",
        )
    if len(rows) - len(answers) > _REPEATED * len(rows):
        yield Finding("note", "prompts", f"{len(rows)} rows have {counted(len(answers), 'different prompt')}")


def asked_answers(rows: Sequence[RewardItem], source: str) -> Iterator[Finding]:
    """Answers that their prompts hold: with a wrong key, each answer is right by itself."""
    texts = [(row.answer.strip(), row.prompt.strip()) for row in rows]
    equal = [answer for answer, prompt in texts if answer and answer == prompt]
    held = [answer for answer, prompt in texts if len(answer) >= _LONG_CHARS and answer in prompt and answer != prompt]
    share = f"of {counted(len(rows), 'answer')} of {source}"
    if equal:
        text = f"{len(equal)} {share} equal their prompt, e.g. {equal[0][:SHOWN_CHARS]!r}"
        kind: Literal["FOUND", "note"] = "FOUND" if len(equal) == len(rows) else "note"
        yield Finding(kind, "answers", f"{text}; set data.answer_key or data.format")
    if held:
        text = f"{len(held)} {share} stand in their prompt word by word, e.g. {held[0][:SHOWN_CHARS]!r}"
        yield Finding("note", "answers", f"{text}: is data.answer_key right?")


def _whole_solutions(config: RunConfig, rows: Sequence[RewardItem], source: str) -> Iterator[Finding]:
    """Answers that hold more than an answer: a response would have to be the same text."""
    first, answers = config.reward.functions[0], [row.answer for row in rows]
    if first.name == "gsm8k":  # which takes the number behind ####
        return
    if first.name == "math_verify":  # which takes the mathematics in these
        answers = [answer for answer in answers if "$" not in answer and "\\boxed" not in answer]
    solutions = [answer for answer in answers if _is_solution(answer)]
    if solutions:
        text = f"{len(solutions)} of {counted(len(rows), 'answer')} of {source} are whole solutions"
        kind: Literal["FOUND", "note"] = "FOUND" if accepts_answers(first) else "note"
        remedy = "let the answer be the number behind ####, or the last box, alone, as data.format takes it from rows"
        yield Finding(kind, "answers", f"{text}, e.g. {solutions[0][:SHOWN_CHARS]!r}; {remedy}")
    elif first.name == "math_verify" and (said := list(filter(_is_sentence, answers))):
        text = (
            f"{len(said)} of {counted(len(rows), 'answer')} of {source} are sentences, e.g. {said[0][:SHOWN_CHARS]!r}"
        )
        yield Finding("note", "answers", f"{text}: math_verify compares mathematics, or words alone")


def _is_solution(answer: str) -> bool:
    box = boxed(answer)
    before, mark, _ = answer.rpartition("####")
    return len(before) >= _LONG_CHARS if mark else box is not None and len(answer) - len(box) >= _LONG_CHARS


def _is_letter(answer: str) -> bool:
    return len(answer) == 1 and answer in "ABCDEFGHIJ"


def _is_sentence(answer: str) -> bool:
    """Words and a number between them; ``x \\text{ or } y`` is none."""
    plain = _COMMAND.sub(" ", answer)
    return any(sign.isdigit() for sign in plain) and _WORDS.search(plain) is not None


def _too_long(config: RunConfig, tokenizer: Any, rows: Sequence[RewardItem], source: str) -> Iterator[Finding]:
    """Answers that a response has no room for; mathematics may have a shorter form."""
    limit, measured, first = config.rollout.max_new_tokens, rows[:_MEASURED], config.reward.functions[0]
    if first.name not in ("exact_match", "math_verify") or not accepts_answers(first):
        return
    texts = [(boxed(row.answer) if first.name == "math_verify" else None) or row.answer for row in measured]
    longer = sum(len(tokenizer.encode(text, add_special_tokens=False)) > limit for text in texts)
    if longer:
        is_hopeless = first.name == "exact_match" and longer == len(measured)
        kind: Literal["FOUND", "note"] = "FOUND" if is_hopeless else "note"
        text = f"{longer} of {counted(len(measured), 'answer')} of {source} alone have more tokens than"
        yield Finding(kind, "answers", f"{text} rollout.max_new_tokens={limit}; raise it")
