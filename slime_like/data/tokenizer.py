"""Loading of a checkpoint's tokenizer."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from slime_like.errors import DataError


def load_tokenizer(path: Path) -> Any:
    """Load the tokenizer of a checkpoint directory. Nothing is downloaded, and no code of the checkpoint runs.

    Raises:
        DataError: there is no tokenizer, or it cannot be read.
    """
    if problem := missing_tokenizer(path):
        raise DataError(problem, code="no-tokenizer")
    try:
        return _tokenizer_class(Path(path)).from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged files raise whatever the parser met first
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        problem, remedy = f"its tokenizer cannot be loaded ({said})", "copy the checkpoint's files again"
        raise DataError(problem, code="damaged-tokenizer", who=str(path), remedy=remedy) from error


def missing_tokenizer(path: Path) -> str | None:
    """Return why a checkpoint directory has no tokenizer at all, or ``None`` if it has one, good or bad."""
    if (Path(path) / "tokenizer_config.json").is_file():
        return None
    if not Path(path).exists():
        return f"{path}: does not exist; give a Hugging Face directory"
    return f"{path}: has no tokenizer (tokenizer_config.json is missing); copy the checkpoint's tokenizer there"


def token_names(tokenizer: Any, ids: Collection[int]) -> str:
    """List the tokens' spellings in order. An id that the tokenizer does not have is shown as a number."""
    known = zip(sorted(ids), tokenizer.convert_ids_to_tokens(sorted(ids)), strict=True)
    return ", ".join(str(token) if name is None else repr(name) for token, name in known)


def template_fault(error: Exception) -> tuple[str, str]:
    """Return the error of a chat template and its remedy. Templates are programs of the checkpoint."""
    from jinja2 import TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno}: {error}", "correct the template, or give model.path another one"
    return str(error), "correct the messages, or give model.path another chat template"


def _tokenizer_class(path: Path) -> Any:
    """Return the generic class if the checkpoint names it. ``AutoTokenizer`` finds all others, but imports every model
    and torch's compiler, which takes seconds."""
    named = json.loads((path / "tokenizer_config.json").read_text())
    if named.get("tokenizer_class") == "TokenizersBackend" and "auto_map" not in named:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer
