"""Text and tokens: a tokenizer's files, its special tokens, and turns as a chat template writes them."""

import copy
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

from slime_like.errors import DataError
from slime_like.models.config_json import read_object
from slime_like.system.interrupts import TimeLimitExceeded, time_limit

_SETTINGS = ("special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates/*")
_FILES = ("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken", *_SETTINGS)
"""Patterns of the files that tokenizers of transformers read."""

_OTHER = re.compile(r".*\.(safetensors|bin|pth?|gguf|h5|msgpack|onnx|md|index\.json)|(generation_)?config\.json|\..*")

CUT = "\ufdd0"
"""Mark at which text is cut before it is encoded: a Unicode noncharacter, which text never contains."""

SAID = "said-by-the-model"
"""Content of a placeholder turn."""
ASKED = {"role": "user", "content": "question"}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "environment", "arguments": {"said": SAID}}}
_PLACEHOLDERS: tuple[Mapping[str, Any], ...] = ({"content": SAID}, {"content": "", "tool_calls": [_CALL]})

_RENDERING_S = 10.0
"""Limit on the processor time of one rendering. Templates and messages of strangers can loop forever."""
_COUNTED_CHARS, _USUAL_CHARS = 65536, 8
"""Characters that are counted together, and characters per token up to which a text is encoded uncounted."""


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


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a checkpoint directory. Nothing is downloaded.

    Raises ``DataError`` if there is no tokenizer, it cannot be read, or its code is not trusted.
    """
    if not (path / "tokenizer_config.json").is_file():
        missing = "has no tokenizer (tokenizer_config.json is missing)" if path.exists() else "does not exist"
        raise DataError(missing, code="no-tokenizer", who=str(path), remedy="give a Hugging Face directory with one")
    try:
        code = own_tokenizer(path)
        if code is None or trust_remote_code:
            kind = _tokenizer_class(path, code)
            return kind.from_pretrained(str(path), local_files_only=True, trust_remote_code=code is not None)
    except Exception as error:  # damaged files raise whatever the parser met first
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        problem, remedy = f"its tokenizer cannot be loaded ({said})", "copy the checkpoint's files again"
        raise DataError(problem, code="damaged-tokenizer", who=str(path), remedy=remedy) from error
    # Another tokenizer with the same files would give other ids.
    problem, remedy = f"its tokenizer is its own code ({code})", "set model.trust_remote_code: true if you trust it"
    raise DataError(problem, code="tokenizer-code", who=str(path), remedy=remedy)


def _tokenizer_class(path: Path, code: str | None) -> Any:
    """Return the checkpoint's own class, or the generic one if the checkpoint names it.

    ``AutoTokenizer`` takes seconds to import, and ignores the code of a checkpoint of a known family.
    """
    if code is not None:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(code, str(path), local_files_only=True)
    import transformers

    named = json.loads((path / "tokenizer_config.json").read_text()).get("tokenizer_class")
    return transformers.PreTrainedTokenizerFast if named == "TokenizersBackend" else transformers.AutoTokenizer


class TooManyTokens(Exception):
    """A text has more than twice as many tokens as it may have. The argument is how many were counted."""


class TemplateFault(ValueError):
    """The chat template rejects the messages. The error's text is what the template reported, with its type.

    Attributes:
        said: what the template reported.
        remedy: what to do about it.
    """

    def __init__(self, error: Exception) -> None:
        from jinja2 import TemplateSyntaxError

        super().__init__(f"{type(error).__name__}: {error}".replace(CUT, ""))
        self.said, self.remedy = str(error), "correct the messages, or give model.path another chat template"
        if isinstance(error, TemplateSyntaxError):
            self.said = f"line {error.lineno}: {error}"
            self.remedy = "correct the template, or give model.path another one"


class EndlessRendering(TemplateFault):
    """A rendering was interrupted."""


def render_messages(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    prompt: bool = False,
) -> str:
    """Render messages, with the generation prompt if ``prompt``. Raises ``TemplateFault``."""
    try:
        with time_limit(_RENDERING_S):
            text: str = tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=prompt
            )
    except TimeLimitExceeded as error:
        raise EndlessRendering(TimeoutError(f"a rendering took more than {_RENDERING_S:g} s")) from error
    except Exception as error:  # templates are programs of the checkpoint and can raise anything
        raise TemplateFault(error) from error
    return text


def with_template_variables(tokenizer: Any, variables: Mapping[str, Any]) -> Any:
    """Return the tokenizer, or a copy of it that gives its chat template these variables in every rendering."""
    if not variables:
        return tokenizer
    copied = copy.copy(tokenizer)
    copied.apply_chat_template = partial(tokenizer.apply_chat_template, **variables)
    copied.template_variables = {**getattr(tokenizer, "template_variables", {}), **variables}
    return copied


def cut_special(value: Any, special: re.Pattern[str]) -> Any:
    """Insert a cut after the first character of every special token that a value's texts spell."""
    if isinstance(value, str):
        whole = value.encode("utf-8", "replace").decode().replace(CUT, "\ufffd")
        return special.sub(lambda found: found[0][:1] + CUT + found[0][1:], whole)
    if isinstance(value, Mapping):
        return {cut_special(key, special): cut_special(item, special) for key, item in value.items()}
    return [cut_special(item, special) for item in value] if isinstance(value, list | tuple) else value


def encode_pieces(tokenizer: Any, pieces: Iterable[str], most: int = sys.maxsize) -> list[int]:
    """Encode the pieces of a text with cuts. A special token that was cut becomes plain text.

    Raises ``TooManyTokens`` if there are more than twice as many as ``most``, which also bounds time and memory: a long
    piece is first counted in parts. Cutting it into parts adds only a few tokens.
    """
    tokens: list[int] = []
    for piece in filter(None, pieces):
        is_long, counted = len(piece) > max(_COUNTED_CHARS, _USUAL_CHARS * most), len(tokens)
        parts = (piece[at : at + _COUNTED_CHARS] for at in range(0, len(piece) if is_long else 0, _COUNTED_CHARS))
        for part in chain(parts, [piece]):
            new: list[int] = tokenizer.encode(part, add_special_tokens=False)
            counted = len(new) + (len(tokens) if part is piece else counted)
            if counted > 2 * most:
                raise TooManyTokens(counted)
        tokens += new
    return tokens


def last_turn_end(render: Callable[..., str], called: bool = False) -> str:
    """Return what the template writes after the content of an assistant's turn that is the last message.

    Args:
        render: renders a list of messages; ``prompt`` says whether the generation prompt follows.
        called: whether the turn calls a tool. Some templates render answers of tools only after a call.
    """
    return render([ASKED, {"role": "assistant", **_PLACEHOLDERS[called]}], prompt=False).partition(SAID)[2]


def text_after_turn(
    render: Callable[..., str],
    following: Sequence[Mapping[str, Any]],
    special: re.Pattern[str],
    alone: str,
    called: bool = False,
) -> tuple[str, str, str]:
    """Return what the template writes after an assistant's turn if ``following`` messages come next.

    Args:
        alone: ``last_turn_end`` with the same ``render`` and ``called``.

    Returns:
        The special token that ends the turn if it is the last, the one that ends it in history, and the text after that
        up to where the next turn begins. The tokens are empty if only the header of the next message ends a turn.
    """
    turn = {"role": "assistant", **_PLACEHOLDERS[called]}
    after = render([ASKED, turn, *following], prompt=True).partition(SAID)[2]
    for end in reversed(list(special.finditer(alone))):
        if after.startswith(alone[: end.end()]):
            return end[0], end[0], after[end.end() :]
    first = special.search(alone)
    other = special.match(after, first.start()) if first and after.startswith(alone[: first.start()]) else None
    if first and other:
        return first[0], other[0], after[other.end() :]
    return "", "", after.removeprefix(alone.rstrip())


def special_token_pattern(tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern of the special tokens' spellings, longest first. It matches nothing if there are none."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    spelled = sorted(filter(None, {*tokenizer.all_special_tokens, *added}), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, spelled)) or "(?!)")


def decode_exactly(tokenizer: Any, tokens: Iterable[int]) -> str:
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
