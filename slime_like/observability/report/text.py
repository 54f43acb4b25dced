"""Text of a run, made fit to be shown: a model's output is hostile, long, or wrapped in a chat template."""

import json
import re

# Control characters steer a terminal; direction marks, invisible ones and lone surrogates hide a text's meaning.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_LAYOUT = str.maketrans({"\t": r"\t", "\n": r"\n"})

# Marks of the common chat templates: ChatML, Llama, Gemma, DeepSeek, Mistral, and the tiny model's.
_MARK = r"(?:<[|\uff5c][^<>]*[|\uff5c]>|<(?:start|end)_of_turn>|<(?:user|assistant)>|\[/?INST\])"
_USER = re.compile(rf"{_MARK}\s?user\b\s*{_MARK}?|<[|\uff5c]?user[|\uff5c]?>|\[INST\]", re.IGNORECASE)


def spelled_out(text: str, one_line: bool = False) -> str:
    r"""``text`` with every unprintable character as its escape (``\x1b``, ``\u202e``); line breaks and tabs stay,
    unless ``one_line``."""
    text = _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return text.translate(_LAYOUT) if one_line else text


def shortened(text: str, limit: int) -> str:
    """``text`` without its middle, if it has more than ``limit`` characters: answers stand at the end."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 3]} … ({len(text) - limit} characters) … {text[limit // 3 - limit :]}"


def bare_answer(answer: str | None) -> str | None:
    """The answer itself where the row's is a task in JSON, as reasoning-gym's are."""
    try:
        found = json.loads(answer or "")
    except (ValueError, RecursionError):  # of brackets alone, nested too deeply for the reader
        return answer
    return str(found["answer"]) if isinstance(found, dict) and {"answer", "task"} <= found.keys() else answer


def last_user_message(prompt: str) -> str:
    """The last message of the user in a templated prompt; all of ``prompt`` if no user's turn is marked."""
    turns = list(_USER.finditer(prompt))
    return (re.split(_MARK, prompt[turns[-1].end() :])[0].strip() if turns else "") or prompt
