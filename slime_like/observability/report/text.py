"""Text of a run, prepared for display. A model's output may be hostile, long, or wrapped in a chat template."""

import re

# Control characters affect a terminal. Direction marks, invisible characters and lone surrogates hide what a text says.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_LAYOUT = str.maketrans({"\t": r"\t", "\n": r"\n"})

# Marks of common chat templates: ChatML, Llama, Gemma, DeepSeek, Mistral, and the tiny model's.
_MARK = r"(?:<[|\uff5c][^<>]*[|\uff5c]>|<(?:start|end)_of_turn>|<(?:user|assistant)>|\[/?INST\])"
_USER = re.compile(rf"{_MARK}\s?user\b\s*{_MARK}?|<[|\uff5c]?user[|\uff5c]?>|\[INST\]", re.IGNORECASE)


def spelled_out(text: str, one_line: bool = False) -> str:
    r"""Replace unprintable characters with escapes such as ``\x1b``; with ``one_line``, also line breaks and tabs."""
    text = _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return text.translate(_LAYOUT) if one_line else text


def shortened(text: str, limit: int) -> str:
    """Cut out the middle of a text of more than ``limit`` characters. Answers are at the end."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 3]} … ({len(text) - limit} characters) … {text[limit // 3 - limit :]}"


def last_user_message(prompt: str) -> str:
    """Return the user's last message in a templated prompt; all of ``prompt`` if it marks no user turn."""
    turns = list(_USER.finditer(prompt))
    return (re.split(_MARK, prompt[turns[-1].end() :])[0].strip() if turns else "") or prompt
