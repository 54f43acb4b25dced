"""The parts of a response that count, and rewards for its final answer, form and length."""

import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

from slime_like.interfaces.user_code import RewardResult, group_reward
from slime_like.sandbox.rewards.thinking import THINKING, THOUGHT, with_opening
from slime_like.system.words import extract_boxed

Function = TypeVar("Function", bound=Callable[..., RewardResult])

_QUOTED_TAG = re.compile(r"""(?<!`)`</?think>`(?!`)|(["'])</?think>\1""")
_OPENING = re.compile(r"(`{3,})[ \t]*([^\s`]*)[^`]*$")
_NO_MATCH = "no match of the pattern"
_MARKER = "####"
_MAX_PATH_CHARS = 100
_NUMBER = re.compile(r"[-+]?\$?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,4}(?!\d))?", re.ASCII)
# A second value, or arithmetic left undone.
_BETWEEN = r"[-+*/^:;,=x\u00d7\u00f7\u2013]|\*\*|\\(?:times|cdot|div)|and|or|to"
_CONTINUED = re.compile(rf"[ \t]*(?:(?:{_BETWEEN})[ \t]*[-$*(]{{0,4}}\d|\d|\(?or\b[^\n]*\d)|\.\d|[eE][-+]?\d")
_TRUE_LETTER = re.compile(r"\(?([A-J])\)?\.?", re.IGNORECASE)
_LETTER = re.compile(
    r"(?:[^\w?]|text(?:bf)?|math(?:rm|bf))*(?<!\w)([A-J])(?:[^\w?]*|[).:]+\s+(?!or\b|and\b)\w{2}.*)", re.DOTALL
)
"""A letter surrounded only by markup, or in front of its option's text (``B) Paris``)."""
_ANSWER = re.compile(
    r"(?:<answer>|(?:^[^\w\n]*|\bthe\s)(?:final |correct |best )?answer(?:[^\w\n]*:|\s+is\b))"
    r"((?:(?!</answer>|the (?:\w+ )?answer).)*)",
    re.IGNORECASE | re.MULTILINE,
)
_FRACTION = re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_PLAIN_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d)|/\d+)?")
_MAX_CHARS = 4096
_MAX_DIGITS = 200


def after_thinking(response: str, prompt: str = "") -> str:
    """Return the text after the last ``</think>``, without unfinished thinking. Quoted tags are text."""
    return last_match(None, response, prompt) or ""


def last_match(pattern: str | None, response: str, prompt: str = "") -> str | None:
    """Return the last match of a regular expression, or its first group if it has one; ``None`` without a match.

    A match inside the thinking does not count. A match that begins there counts if there is none after it. Without a
    pattern, the text after the thinking matches.
    """
    response = with_opening(response, prompt)
    begin, end = _answer_span(response)
    if pattern is None:
        return response[begin:end]
    matches = list(re.finditer(pattern, response[begin:end]))
    if begin and not matches:
        matches = [match for match in re.finditer(pattern, response) if match.end() >= begin]
    return (matches[-1].group(1 if matches[-1].re.groups else 0) or "") if matches else None


def _answer_span(response: str) -> tuple[int, int]:
    unquoted = _QUOTED_TAG.sub(lambda found: " " * len(found[0]), response)
    thought = unquoted.rfind(THOUGHT)
    begin = 0 if thought < 0 else thought + len(THOUGHT)
    thinking = unquoted.find(THINKING, begin)
    return begin, len(response) if thinking < 0 else thinking


def last_block(text: str, languages: Container[str]) -> str | None:
    """Return the last fenced block of one of the languages (in lower case), else the last one without a language."""
    blocks = list(_blocks(text))
    of_language = [body for language, body in blocks if language in languages]
    unnamed = [body for language, body in blocks if not language]
    return next((found[-1] for found in (of_language, unnamed) if found), None)


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and text of each closed block.

    A block may open after other text. It closes where a line begins or ends with its fence. A fence that is followed by
    a language opens the next block.
    """
    fence, language, body = "", "", list[str]()
    for line in text.replace("\r\n", "\n").split("\n"):
        opening, bare = _OPENING.search(line), line.strip()
        begins = bool(fence) and bare.startswith(fence)
        if opening and (not fence or (begins and bare.lstrip("`")[:1].isalpha())):
            fence, language, body = opening[1], opening[2].lower(), []
        elif begins or (fence and bare.endswith(fence)):
            lines = body if begins else [*body, line.rstrip().removesuffix(fence)]
            yield language, textwrap.dedent("".join(f"{each}\n" for each in lines))  # in a list it is indented
            fence = ""
        else:
            body.append(line)


def any_answer(function: Function) -> Function:
    """Let ``answer`` be a JSON list of texts, as rows with several right answers have. The best result counts."""

    @wraps(function)
    def best(prompt: str, response: str, answer: str, **options: Any) -> RewardResult:
        try:
            listed = json.loads(answer) if answer.startswith('["') else [answer]
        except ValueError:
            listed = [answer]
        right = listed if all(isinstance(text, str) for text in listed) else [answer]
        results = [function(prompt, response, text, **options) for text in right]
        return max(results, key=lambda result: (result.reward, result.success))

    return cast(Function, best)


@any_answer
def exact_match(
    prompt: str, response: str, answer: str, *, pattern: str | None = None, ignore_case: bool = False
) -> RewardResult:
    r"""1 if the response equals ``answer`` up to white space, else 0.

    Args:
        pattern: a regular expression, e.g. ``Answer: (.*)``. Its last match, or that match's first group, is compared.
        ignore_case: ignore case.
    """
    found = last_match(pattern, response, prompt)
    if found is None:
        return RewardResult(0.0, False, {"reason": _NO_MATCH})
    given, wanted = (" ".join(text.split()) for text in (found, answer))
    return _result(given.casefold() == wanted.casefold() if ignore_case else given == wanted)


@any_answer
def gsm8k(prompt: str, response: str, answer: str, *, require_marker: bool = True) -> RewardResult:
    """1 if the number after the response's last ``####`` equals the number after ``####`` in ``answer``, else 0.

    For rows of GSM8K (arXiv:2110.14168), and for answers that are numbers.

    Args:
        require_marker: if false, a response without ``####`` gives its last number.

    Raises:
        ValueError: ``answer`` has no number there.
    """
    wanted = _NUMBER.match(answer.rpartition(_MARKER)[2].strip().replace("\u2212", "-"))
    if wanted is None:
        raise ValueError(f"the answer {answer[-40:]!r} has no number after {_MARKER}")
    said = after_thinking(response, prompt)
    if _MARKER in said:
        last = said.rpartition(_MARKER)[2].strip(" \t\r\n*:$`(").removeprefix("\\boxed{").removeprefix("\\")
        last = last.replace("\u2212", "-")
        found = _NUMBER.match(last)
        if found is not None and _CONTINUED.match(last, found.end()):
            return RewardResult(0.0, False, {"reason": f"more than a number after {_MARKER}"})
    else:
        numbers = [] if require_marker else list(_NUMBER.finditer(said))
        found = numbers[-1] if numbers else None
    if found is None:
        return RewardResult(0.0, False, {"reason": f"no number after {_MARKER}" if require_marker else "no number"})
    return _result(_value(found.group()) == _value(wanted.group()))


@any_answer
def multiple_choice(prompt: str, response: str, answer: str) -> RewardResult:
    r"""1 if the response chooses the letter (A to J) of ``answer``, else 0.

    The choice is the content of the last ``\boxed{}``; else what follows the last ``Answer:``, ``the answer is`` or
    ``<answer>`` on its line; else the whole response. It must be one capital letter, alone or in front of its option's
    text (``B) Paris``).

    Raises:
        ValueError: ``answer`` is not a letter. Numbers start at 0 in some data sets and at 1 in others.
    """
    wanted = _TRUE_LETTER.fullmatch(answer.strip())
    if wanted is None:
        raise ValueError(f"the answer {answer[:40]!r} is not a letter from A to J")
    said = after_thinking(response, prompt)
    chosen = extract_boxed(said)
    if chosen is None:
        chosen = (_ANSWER.findall(said) or [said])[-1]
    letter = _LETTER.fullmatch(chosen)
    if letter is None:
        return RewardResult(0.0, False, {"reason": "no choice found"})
    return _result(letter[1] == wanted[1].upper())


def _result(succeeds: bool) -> RewardResult:
    return RewardResult(float(succeeds), succeeds)


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("$", ""))


def json_schema(prompt: str, response: str, answer: str, *, schema: Mapping[str, Any] | None = None) -> RewardResult:
    """1 if the response, or its last fenced block of JSON, is JSON that fits a JSON Schema, else 0.

    Args:
        schema: schema of all rows; default: ``answer``, as JSON. ``$ref`` must stay inside it.

    Raises:
        ValueError: there is no valid schema.
    """
    validator = _validator(answer if schema is None else json.dumps(schema))
    said = after_thinking(response, prompt)
    block = last_block(said, ("json",))
    try:
        value = json.loads(said if block is None else block, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return RewardResult(0.0, False, {"reason": "no JSON"})
    try:
        fault = next(validator.iter_errors(value), None)
    except RecursionError:
        return RewardResult(0.0, False, {"reason": "nested too deeply"})
    if fault is None:
        return RewardResult(1.0, True)
    place = f"{fault.json_path[:_MAX_PATH_CHARS]}: {fault.validator}"
    return RewardResult(0.0, False, {"reason": f"does not fit the schema ({place})"})


@lru_cache(maxsize=1024)
def _validator(text: str) -> Any:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise ValueError("it is not a JSON object")
        kind = validator_for(schema)
        kind.check_schema(schema)
    except (ValueError, RecursionError, SchemaError) as error:
        raise ValueError(f"{text[:40]!r} is not a JSON Schema ({str(error).splitlines()[0]})") from error
    return kind(schema, registry=Registry())  # this registry downloads nothing


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def reasoning_gym(
    prompt: str, response: str, answer: str, *, pattern: str | None = "(?s)<answer>(.*?)</answer>"
) -> RewardResult:
    """The score from 0 to 1 that the row's task gives; success is the full score.

    For rows of ``slime-like make-tasks``.

    Args:
        pattern: as for ``exact_match``; none: the whole response is judged.

    Raises:
        ValueError: ``answer`` is not from such a row.
    """
    from reasoning_gym.factory import get_score_answer_fn  # imports all tasks, which takes seconds

    try:
        entry = json.loads(answer)
        if not isinstance(entry, dict) or not {"task", "question", "answer", "metadata"} <= entry.keys():
            raise ValueError("it lacks a task's fields")
    except ValueError as error:
        problem = f"the answer {answer[:40]!r} is not from a row of `slime-like make-tasks` ({error})"
        raise ValueError(problem) from error
    given = last_match(pattern, response, prompt)
    if given is None:
        return RewardResult(0.0, False, {"reason": _NO_MATCH})
    try:
        score = float(get_score_answer_fn(entry["task"])(given.strip(), entry))
    except MemoryError:
        raise
    except Exception as error:  # judges raise anything for answers of another form; the row itself is sound
        reason = f"not judged ({type(error).__name__})"
        return RewardResult(0.0, False, {"reason": reason, "task": entry["task"]})
    return RewardResult(score, score >= 1.0, {"task": entry["task"]})


@group_reward
def majority(
    prompt: str, responses: Sequence[str], answer: str, *, min_share: float = 0.0, require_answer: bool = True
) -> list[RewardResult]:
    """1 if a response's final answer is the most frequent answer of its group, else 0.

    TTRL (arXiv:2504.16084, equation 2). If several answers are the most frequent, no response is rewarded. The final
    answer is the content of the last ``\\boxed{}``, else the last number. Numbers are compared by value.

    Args:
        prompt, answer: ignored.
        responses: all responses of one group.
        min_share: least share of the most frequent answer.
        require_answer: if false, a response without box and number is its own answer.
    """
    answers = [_final_answer(after_thinking(response, prompt)[-_MAX_CHARS:], require_answer) for response in responses]
    counts = Counter(answer for answer in answers if answer is not None).most_common(2)
    tied = len(counts) == 2 and counts[0][1] == counts[1][1]
    share = counts[0][1] / len(responses) if counts else 0.0
    winner = counts[0][0] if counts and share >= min_share and not tied else None
    wins = [winner is not None and answer == winner for answer in answers]
    return [
        RewardResult(float(won), won, {"answer": answer, "share": share})
        for won, answer in zip(wins, answers, strict=True)
    ]


def _final_answer(response: str, require_answer: bool) -> str | None:
    box, numbers = extract_boxed(response), _PLAIN_NUMBER.findall(response)
    if box is not None:
        return _plain(_FRACTION.sub(r"\1/\2", "".join(box.split())))
    if numbers:
        return _plain(numbers[-1])
    text = " ".join(response.split()).casefold()
    return text if text and not require_answer else None


def _plain(text: str) -> str:
    """Return a number in one spelling, and other text unchanged."""
    if _PLAIN_NUMBER.fullmatch(text) is None or len(text) > _MAX_DIGITS:
        return text
    try:
        return str(Fraction(text.replace(",", "")))
    except (ValueError, ZeroDivisionError):
        return text


def response_format(prompt: str, response: str, answer: str, *, pattern: str) -> RewardResult:
    """1 if the whole response matches the regular expression ``pattern``, else 0.

    Args:
        pattern: in Python's syntax; ``.`` matches line breaks too.
    """
    return _result(re.fullmatch(pattern, with_opening(response, prompt), flags=re.DOTALL) is not None)


def response_length(prompt: str, response: str, answer: str, *, limit: int, buffer: int = 0) -> RewardResult:
    """0 up to ``limit`` characters, then falling linearly to -1 at ``limit + buffer`` and beyond.

    DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), on characters. Success: up to ``limit``.

    Args:
        limit: characters without penalty.
        buffer: characters over which the penalty grows; 0: immediately.
    """
    excess = len(response) - limit
    if excess <= 0:
        return RewardResult(reward=0.0, success=True)
    return RewardResult(reward=-min(1.0, excess / buffer) if buffer > 0 else -1.0, success=False)
