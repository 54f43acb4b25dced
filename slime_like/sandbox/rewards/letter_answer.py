"""Reward for the letter of a choice."""

import re
from collections.abc import Sequence

from slime_like.interfaces.reward import RewardResult
from slime_like.sandbox.rewards.response_parts import after_thinking

_LETTERS = "A-J"
# Repeats are bounded: of several unbounded ones beside each other, a hostile response tries every division.
_GAP = r"\s{0,4}"
_OPEN = r"(?:[*_`\"'$(\[{]|\\\(|\\(?:text|textbf|mathrm|mathbf)\{|\s(?=[^\W\d_]\s?\})){0,4}"
_CLOSE = r"(?:[*_`\"'$)\]}]|\\\)){0,4}"
_A_WORD = r"(?<=[AI])\s(?!because|since|as\b|for\b|which|is\b|due|based|from|with|given|according)[a-z]"
"""An article, or a pronoun."""
_NO_WORD = rf"(?![\w'])(?!{_A_WORD})"
_ANOTHER = rf"{_GAP}(?:,|/|&|\bor\b|\band\b){_GAP}{_OPEN}[{_LETTERS}]{_CLOSE}{_NO_WORD}"
_LETTER = rf"{_OPEN}(?<![^\W_])([{_LETTERS}]){_NO_WORD}{_CLOSE}(?!\s?\?)(?!{_ANOTHER})"
_BOX = re.compile(
    rf"\\boxed\{{{_GAP}(?:\\(?:text|textbf|mathrm|mathbf)\{{)?{_GAP}[*]{{0,4}}\(?([{_LETTERS}])\)?[*]{{0,4}}"
    rf"(?:[.\s]*|(?:[.:]|(?<=\)))[^{{}}]*|\s*\\text\{{[^{{}}]*)\}}"
)
_IS = rf"""["'*_`]{{0,4}}(?i:\s{{1,4}}(?:is|should\sbe|must\sbe))?{_GAP}:?[*_]{{0,4}}"""
_NOT = r"(?i:(?<!wrong )(?<!incorrect )(?<!false )(?<!not )(?<!not the ))"
_FORMS = (
    re.compile(rf"{_NOT}(?i:\banswer){_IS}{_GAP}{_LETTER}"),
    re.compile(rf"{_NOT}(?i:\banswer){_IS}[^.?\n(]{{1,60}}\(([{_LETTERS}])\)(?!\s?\?)(?!{_ANOTHER})"),
    re.compile(rf"{_NOT}(?i:\b(?:choice|option|choose|pick|select)){_IS}{_GAP}{_LETTER}"),
    re.compile(
        rf"(?<![\w'/,])(?<!, )(?<!/ )(?<! or )(?<! and ){_LETTER}{_GAP}is\s(?:the\s)?(?:correct|right|answer|best)\b"
    ),
)
_TAG = re.compile(r"</?answer>", re.IGNORECASE)
_LINE = re.compile(
    rf"{_OPEN}([{_LETTERS}]){_CLOSE}[).:]?{_CLOSE}(?<=[).:])\s.*|{_OPEN}([{_LETTERS}]){_CLOSE}[).:]?{_CLOSE}"
)
_TRUE_LETTER = re.compile(rf"\(?([{_LETTERS}])\)?\.?", re.IGNORECASE)


def multiple_choice(prompt: str, response: str, answer: str) -> RewardResult:
    r"""1 where the response chooses the letter (A to J) of ``answer``, else 0.

    The choice is the last letter in ``\boxed{}``; else the last one called answer, else choice or option, else correct;
    else that of the only line that is, or begins with, a choice: ``(B)``, ``B.``, ``B) Paris``.

    Raises:
        ValueError: ``answer`` is no letter. Numbers begin at 0 in some data sets and at 1 in others.
    """
    wanted = _TRUE_LETTER.fullmatch(answer.strip())
    if wanted is None:
        raise ValueError(f"the answer {answer[:40]!r} is no letter from A to J")
    said = _TAG.sub(" ", after_thinking(response))
    letters = next(filter(None, (each.findall(said) for each in (_BOX, *_FORMS))), None) or _of_lines(said)
    if not letters:
        return RewardResult(0.0, False, {"reason": "no choice found"})
    succeeds = letters[-1] == wanted.group(1).upper()
    return RewardResult(float(succeeds), succeeds)


def _of_lines(text: str) -> Sequence[str]:
    """The letter of the lines that are choices; of several letters, that of a last line without text."""
    lines = [line.strip() for line in text.strip().splitlines()]
    found = [match for match in map(_LINE.fullmatch, lines) if match]
    letters = {match[1] or match[2] for match in found}
    if len(letters) > 1:
        letters = {found[-1][2]} if found[-1][2] and found[-1].string == lines[-1] else set()
    return list(letters)
