"""Reward for the letter of a choice."""

import re

from slime_like.interfaces.reward import RewardResult
from slime_like.sandbox.rewards.response_parts import after_thinking
from slime_like.system.latex import boxed

_TRUE_LETTER = re.compile(r"\(?([A-J])\)?\.?", re.IGNORECASE)
_LETTER = re.compile(
    r"(?:[^\w?]|text(?:bf)?|math(?:rm|bf))*(?<!\w)([A-J])(?:[^\w?]*|[).:]+\s+(?!or\b|and\b)\w{2}.*)", re.DOTALL
)
"""A letter with nothing around it but markup, or in front of its option's text (``B) Paris``)."""
_ANSWER = re.compile(
    r"(?:<answer>|(?:^[^\w\n]*|\bthe\s)(?:final |correct |best )?answer(?:[^\w\n]*:|\s+is\b))"
    r"((?:(?!</answer>|the (?:\w+ )?answer).)*)",
    re.IGNORECASE | re.MULTILINE,
)


def multiple_choice(prompt: str, response: str, answer: str) -> RewardResult:
    r"""1 if the response chooses the letter (A to J) of ``answer``, else 0.

    The choice is the content of the last ``\boxed{}``; else what follows the last ``Answer:``, ``the answer is`` or
    ``<answer>`` on its line; else the whole response. It must be one capital letter, alone or in front of its option's
    text (``B) Paris``). Ask for one of these forms in the prompt.

    Raises:
        ValueError: ``answer`` is not a letter. Numbers begin at 0 in some data sets and at 1 in others.
    """
    wanted = _TRUE_LETTER.fullmatch(answer.strip())
    if wanted is None:
        raise ValueError(f"the answer {answer[:40]!r} is not a letter from A to J")
    said = after_thinking(response)
    chosen = boxed(said)
    if chosen is None:
        chosen = (_ANSWER.findall(said) or [said])[-1]
    letter = _LETTER.fullmatch(chosen)
    if letter is None:
        return RewardResult(0.0, False, {"reason": "no choice found"})
    succeeds = letter[1] == wanted[1].upper()
    return RewardResult(float(succeeds), succeeds)
