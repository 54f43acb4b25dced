"""Model output, escaped for display."""

import re

# Control characters steer a terminal; direction marks, invisible ones and lone surrogates hide a text's meaning.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_LAYOUT = str.maketrans({"\t": r"\t", "\n": r"\n"})


def spelled_out(text: str, one_line: bool = False) -> str:
    r"""``text`` with every unprintable character as its escape (``\x1b``, ``\u202e``); line breaks and tabs stay,
    unless ``one_line``."""
    text = _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return text.translate(_LAYOUT) if one_line else text
