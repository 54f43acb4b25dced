"""Reward for the letter of a choice."""

import re
from collections.abc import Iterator

from slime_like.interfaces.reward import RewardResult
from slime_like.sandbox.rewards.response_parts import after_thinking
from slime_like.system.latex import boxed

_TRUE_LETTER = re.compile(r"\(?([A-J])\)?\.?", re.IGNORECASE)
_TAG, _FONT = re.compile(r"</?answer>", re.IGNORECASE), re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s?\{([^{}]*)\}")
_SEVERAL_BOXES = re.compile(r"\\boxed\s?\{[^{}]*\}[\s$]{0,4}(?:,|or|and|/)?[\s$]{0,4}\\boxed\b")
_QUOTED = re.compile(r"['\u2018]([A-J])['\u2019]")
_MARKUP = re.compile(r"[*_`\"\u201c\u201d$]|\\[()]")
_LETTER = re.compile(r"(?<![\w'.])([(\[{]?)([A-J])([)\]}]?)(?![\w']|\.\w)")
_WORD_BEHIND = re.compile(r"[ \t]+([a-z']+)")
_AFTER_A_CHOICE = re.compile(
    r"(?:although|and|as|based|because|but|by|due|follows|for|from|given|here|if|in|is|it|not|of|or|over|rather|since|so|"
    r"than|that|then|therefore|though|under|which|when|where|while|with)\b"
)
"""Words that may follow a letter; behind others, A is an article and I a pronoun."""
_JOINED = re.compile(
    r"[ \t]*(?:,?[ \t]*(?:or|and|maybe|perhaps|not)\b|[,;/|&+-]|\((?![A-J]\)))?[ \t]*"
    r"(?:(?:or|maybe|perhaps|possibly)\b[ \t]*){0,2}"
)
_VERB = re.compile(r"[ \t]*(?:is|are|was|has|needs|would|does|cannot|can't|isn't|seems|looks)\b")
_NEGATION = re.compile(
    r"n't\b|\b(?:not|never|no|neither|nor|wrong|incorrect|false|doubt|whether|eliminat\w*|exclud\w*|avoid|but|except|if|rule|tempted|"
    r"mistake|might|claims|told|least|possible)\b",
    re.IGNORECASE,
)
_BUT = re.compile(r"\bbut\b")
_CLAUSE_END = re.compile(r"[.!?;\n]|,\s|\b(?:no|wait)\b(?=,)", re.IGNORECASE)
_FILLERS = (
    r"(?:\s|[:=,\u2013\u2014-]|\b(?:has|here|is|are|would|should|must|will|be|to|the|this|question|clearly|most|likely|"
    r"indeed|thus|therefore|definitely|actually|really|then|hence|simply|option|choice|correct|right|one|letter|as|follows)\b)"
)
_ANSWER = re.compile(rf"\b(?:answer|ans|response)\b['\"]?({_FILLERS}{{0,12}})$", re.IGNORECASE)
_LINK = re.compile(r"[:=\n\u2013\u2014-]|\b(?:has|is|are|would|should|must|will)\b", re.IGNORECASE)
_NAMED = re.compile(r"\b(?:option|choice)\s?$", re.IGNORECASE)
_IS, _DENIED = (
    re.compile(r"\bis\s?$"),
    re.compile(r"n't\b|\b(?:wrong|incorrect|false|least|if|might|possible|no)\b", re.IGNORECASE),
)
_LOOKED_AT = re.compile(r"\b(?:consider|look|check|examine|evaluate|analy[sz]e)\b", re.IGNORECASE)
_ANSWER_IN_WORDS = re.compile(r"\banswer\b(?:\s(?:is|would be|should be))?:?\s[^.?!\n(]{1,60}$", re.IGNORECASE)
_CHOSEN = re.compile(
    r"\b(?:choose|chose|pick|select|go with|(?:correct|right|best|my|final) (?:choice|option)(?: is|:))"
    r"(?: (?:the )?(?:option|choice|letter))?[ :]*$",
    re.IGNORECASE,
)
_CONFIRMED = re.compile(
    r"\s?(?:is|must be|should be)\s(?:the\s)?(?:correct|right|best|answer)\b(?! (?:avoided|next|to))"
)
_CONCLUSION = re.compile(
    rf"(?:{_FILLERS}|\b(?:so|it|it's|final|finally|answer|i|i'd|i'll|think|believe|go|with|choose|pick|my)\b|\*)*",
    re.IGNORECASE,
)
_CHOICE_LINE = re.compile(r"[(\[{]?([A-J])(?:[)\]}]?[.:]?|(?:[)\]}]?[.:]|[)\]}])\s(?P<text>.*)|[)\]}]?(?: -|,)\s.*)")
_LIST = re.compile(r"\s*(?:or\b|and\b|[,/&|]|[(\[]?[A-J][)\]]?\s*(?:[.;/|]|$))")
_BEFORE, _BEHIND, _NEAR = 160, 80, 20
"""Characters around a letter that are looked at."""


def multiple_choice(prompt: str, response: str, answer: str) -> RewardResult:
    r"""1 where the response chooses the letter (A to J) of ``answer``, else 0.

    The choice is the letter in the last box; else the last one called the answer; else that of a concluding last line
    (``So B.``); else the last one chosen or called correct; else that of the only line with a choice (``B) Paris``).
    Several together, or denied ones, are none.

    Raises:
        ValueError: ``answer`` is no letter. Numbers begin at 0 in some data sets and at 1 in others.
    """
    wanted = _TRUE_LETTER.fullmatch(answer.strip())
    if wanted is None:
        raise ValueError(f"the answer {answer[:40]!r} is no letter from A to J")
    letter = _chosen(after_thinking(response))
    if letter is None:
        return RewardResult(0.0, False, {"reason": "no choice found"})
    succeeds = letter == wanted.group(1).upper()
    return RewardResult(float(succeeds), succeeds)


def _chosen(response: str) -> str | None:
    box = boxed(response)
    if box is not None and _SEVERAL_BOXES.search(response.rstrip().rpartition("\n")[2]):
        return None
    if box is not None:
        return _of_line(_plain(box)) or _of_conclusion(_plain(box))
    text = _plain(response).strip()
    mentions = list(_mentions(text))
    for is_claim in (_is_answer, _is_in_words):
        if claimed := [found[2] for found in mentions if is_claim(text, found)]:
            return claimed[-1]
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if lines and (letter := _of_conclusion(lines[-1])):
        return letter
    if claimed := [found[2] for found in mentions if _is_chosen(text, found)]:
        return claimed[-1]
    return _of_lines(lines) or (_of_option(lines[-1]) if lines else None)


def _plain(text: str) -> str:
    """Without markup."""
    return _QUOTED.sub(r"\1", _MARKUP.sub("", _FONT.sub(r"\1", _TAG.sub(" ", text))))


def _mentions(text: str) -> Iterator[re.Match[str]]:
    """Letters that stand alone, neither articles nor pronouns, in question, nor one of several."""
    before = 0
    for found in _LETTER.finditer(text):
        if _is_word(text, found):
            continue
        joined = _JOINED.fullmatch(text, before, found.start()) is not None and before > 0
        before = found.end()
        if not joined and not _goes_on(text, found):
            yield found


def _is_word(text: str, found: re.Match[str]) -> bool:
    word = _WORD_BEHIND.match(text, found.end())
    return found[0] in "AI" and word is not None and _AFTER_A_CHOICE.fullmatch(word[1]) is None


def _goes_on(text: str, found: re.Match[str]) -> bool:
    """Whether the letter is asked about, or another follows that is not the subject of a clause."""
    behind = text[found.end() : found.end() + _BEHIND]
    if behind.lstrip(" ").startswith("?"):
        return True
    link = _JOINED.match(behind)
    follower = _LETTER.match(behind, link.end()) if link else None
    if link is None or follower is None or "not" in link[0] or _is_word(behind, follower):
        return False
    words = link[0].split()
    if words in ([], ["("]) and (words or (found[3] and not found[1])):  # an option's own text: D) A and B
        return False
    return not ("or" not in words and _VERB.match(behind, follower.end()))


def _before(text: str, found: re.Match[str]) -> str:
    return text[max(0, found.start() - _BEFORE) : found.start()]


def _clause(text: str, found: re.Match[str]) -> str:
    """What stands before the letter, of its clause."""
    return _CLAUSE_END.split(_before(text, found))[-1]


def _is_answer(text: str, found: re.Match[str]) -> bool:
    before = _before(text, found)
    claim = _ANSWER.search(before)
    if claim is None or not (_LINK.search(claim[1]) or _CONFIRMED.match(text, found.end())):
        return False
    clause = _BUT.split(_CLAUSE_END.split(before[: claim.start()])[-1])[-1]
    return _NEGATION.search(clause) is None


def _is_in_words(text: str, found: re.Match[str]) -> bool:
    """``The answer is: Rome (B)``."""
    before = _before(text, found)
    return (
        found[1] == "(" and _ANSWER_IN_WORDS.search(before) is not None and not _NEGATION.search(_clause(text, found))
    )


def _is_chosen(text: str, found: re.Match[str]) -> bool:
    clause = _clause(text, found)
    if _NEGATION.search(clause):
        return False
    return _CHOSEN.search(clause) is not None or _CONFIRMED.match(text, found.end()) is not None


def _of_conclusion(line: str) -> str | None:
    """The letter of a line of no other words."""
    line = line.strip("{}[]")
    letters = list(_LETTER.finditer(line))
    if len(letters) != 1 or line[letters[0].end() :].strip(" .!"):
        return None
    return letters[0][2] if _CONCLUSION.fullmatch(line[: letters[0].start()]) else None


def _of_option(line: str) -> str | None:
    """The only letter of the line, as an option's name (``this corresponds to option C``) or behind ``is``."""
    found = [each for each in _LETTER.finditer(line) if not _is_word(line, each)]
    if len({each[2] for each in found}) != 1 or _LOOKED_AT.search(line) or line.endswith("?"):
        return None
    before = [line[max(0, each.start() - _NEAR) : each.start()] for each in found]
    is_named = any(map(_NAMED.search, before)) and not _NEGATION.search(line)
    is_called = any(map(_IS.search, before)) and not _DENIED.search(line)
    return found[0][2] if is_named or is_called else None


def _of_line(line: str) -> str | None:
    """The letter that the line is, or begins with: what follows is the option's own text, unless that goes on as a
    list."""
    found = _CHOICE_LINE.fullmatch(line.strip())
    if found is None:
        return None
    if found["text"] is not None:
        return None if _LIST.match(found["text"]) else found[1]
    others = {each[2] for each in _LETTER.finditer(line) if not _is_word(line, each)}
    return found[1] if others <= {found[1]} else None


def _of_lines(lines: list[str]) -> str | None:
    """The letter of the lines that begin with a choice; of several, that of a last line that repeats one."""
    letters = [_of_line(line) for line in lines]
    chosen = {letter for letter in letters if letter}
    if len(chosen) == 1:
        return chosen.pop()
    return letters[-1] if letters and letters.count(letters[-1]) > 1 else None
