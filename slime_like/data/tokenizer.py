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
    from transformers import AutoTokenizer

    if not (Path(path) / "tokenizer_config.json").is_file():
        raise DataError(
            f"{path}: holds no tokenizer (tokenizer_config.json is missing); copy the checkpoint's own there"
        )
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged files raise what the parser met first
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(
            f"{path}: its tokenizer cannot be loaded ({reason}); copy the checkpoint's files again"
        ) from error
