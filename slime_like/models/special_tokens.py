"""Special tokens of a tokenizer as text."""

import re
from typing import Any


def special_token_pattern(tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern of the special tokens' spellings, longest first. It matches nothing if there are none."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    spelled = sorted(filter(None, {*tokenizer.all_special_tokens, *added}), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, spelled)) or "(?!)")
