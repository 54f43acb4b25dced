"""The checkpoint's own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_like.errors import DataError


def load_tokenizer(path: Path) -> Any:
    """The Hugging Face tokenizer of a checkpoint directory; nothing is downloaded, no code of the checkpoint is run.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    from transformers import AutoConfig, AutoTokenizer

    if not (Path(path) / "tokenizer_config.json").is_file():
        raise DataError(
            f"{path}: holds no tokenizer (tokenizer_config.json is missing); copy the checkpoint's own there"
        )
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged files raise what the parser met first
        _require_config(path, AutoConfig)
        raise DataError(
            f"{path}: its tokenizer cannot be loaded ({_one_line(error)}); copy the checkpoint's files again"
        ) from error


def _require_config(path: Path, auto_config: Any) -> None:
    """A tokenizer is chosen by ``config.json``: say so where that is what is wrong."""
    try:
        auto_config.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise DataError(
            f"{path}/config.json: transformers refuses it ({_one_line(error)}); correct it, or copy it again"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
