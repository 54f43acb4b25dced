"""A tokenizer's files, its own code, and its special tokens as text."""

import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from slime_like.models.config_json import read_object

_SETTINGS = ("special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates/*")
_FILES = ("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken", *_SETTINGS)
"""Patterns of the files that tokenizers of transformers read."""

_OTHER = re.compile(r".*\.(safetensors|bin|pth?|gguf|h5|msgpack|onnx|md|index\.json)|(generation_)?config\.json|\..*")


def tokenizer_files(directory: Path) -> list[Path]:
    """List a checkpoint's tokenizer files. The checkpoint's own code may read any file except weights and config."""
    files = {file for pattern in _FILES for file in directory.glob(pattern)}
    if own_tokenizer(directory):
        files |= {file for file in directory.iterdir() if not _OTHER.fullmatch(file.name)}
    return sorted(filter(Path.is_file, files))


def own_tokenizer(directory: Path) -> str | None:
    """Return the class of a tokenizer that the checkpoint implements itself, as ``module.Class``."""
    for name in ("tokenizer_config.json", "config.json"):
        file = directory / name
        mapped = read_object(file).get("auto_map") if file.is_file() else None
        found = mapped.get("AutoTokenizer") if isinstance(mapped, dict) else mapped
        # A pair of a slow and a fast class, either of which may be null.
        found = next(filter(None, reversed(found)), None) if isinstance(found, list) else found
        if found:
            return str(found)
    return None


def special_token_pattern(tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern of the special tokens' spellings, longest first. It matches nothing if there are none."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    spelled = sorted(filter(None, {*tokenizer.all_special_tokens, *added}), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, spelled)) or "(?!)")


def decoded(tokenizer: Any, tokens: Iterable[int]) -> str:
    """Decode tokens to exactly the text that they spell, special tokens included."""
    text: str = tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
    return text


def without_stop(tokenizer: Any, tokens: Iterable[int], stops: Collection[int] | None) -> list[int]:
    """Return a turn's tokens without the special token that ended it, and without padding.

    Other special tokens are kept, because thinking and tool calls may be marked with them.

    Args:
        stops: tokens that end a turn, besides EOS; ``None`` if every special token does.
    """
    kept = list(map(int, tokens))
    if kept and (stops is None or kept[-1] in stops) and _is_special(tokenizer, kept[-1]):
        kept.pop()
    while kept and kept[-1] in _ends(tokenizer):
        kept.pop()
    return kept


@lru_cache(1024)
def _is_special(tokenizer: Any, token: int) -> bool:
    return not tokenizer.decode([token], skip_special_tokens=True)


@lru_cache(16)
def _ends(tokenizer: Any) -> set[int | None]:
    return {tokenizer.eos_token_id, tokenizer.pad_token_id}
