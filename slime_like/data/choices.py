"""Questions with choices, as data sets have them: in a list, by letter, or as texts and labels."""

from collections.abc import Mapping, Sequence
from typing import Any

LETTERS = "ABCDEFGHIJ"
_QUESTIONS = "question", "question_stem"
_PASSAGES = "article", "passage", "context", "text"
"""What a question is about."""
_CHOICES = "choices", "options"
_ANSWERS = "answerKey", "answer_idx", "answer"


def question_and_letter(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """The passage, if any, and the question, with a line for each choice (``A. ...``); and the letter of the right one.
    ``None`` of other rows.

    The answer is a choice's label or text; a number counts the choices from 0 unless these have labels.
    """
    question = next((row[key] for key in _QUESTIONS if isinstance(row.get(key), str)), None)
    choices = next((found for key in _CHOICES if (found := _labelled(row.get(key)))), None)
    answer = next((row[key] for key in _ANSWERS if row.get(key) is not None), None)
    if question is None or not question.strip() or choices is None or (place := _place(answer, *choices)) is None:
        return None
    lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, choices[1], strict=False)]
    passage = next((row[key].strip() for key in _PASSAGES if isinstance(row.get(key), str) and row[key].strip()), None)
    asked = question.strip() if passage is None else f"{passage}\n\n{question.strip()}"
    return "\n".join([asked, "", *lines]), LETTERS[place]


def _labelled(choices: Any) -> tuple[Sequence[str], Sequence[str]] | None:
    """Labels, none where a list has none, and texts."""
    if isinstance(choices, Mapping):
        if set(choices) == {"text", "label"}:
            labels, texts = choices["label"], choices["text"]
        else:
            present = {label: text for label, text in choices.items() if text is not None}
            labels, texts = list(present), list(present.values())
    else:
        labels, texts = [], choices
    are_texts = all(isinstance(each, list) and all(isinstance(text, str) for text in each) for each in (labels, texts))
    fits = are_texts and 2 <= len(texts) <= len(LETTERS) and len(labels) in (0, len(texts))
    return (labels, texts) if fits else None


def _place(answer: Any, labels: Sequence[str], texts: Sequence[str]) -> int | None:
    """Of the right choice."""
    if isinstance(answer, int) and not isinstance(answer, bool) and not labels:
        return answer if 0 <= answer < len(texts) else None
    for names in (labels or LETTERS[: len(texts)], texts):
        if [*names].count(str(answer)) == 1:
            return [*names].index(str(answer))
    return None
