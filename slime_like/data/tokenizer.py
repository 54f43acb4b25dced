"""Loading of a checkpoint's tokenizer."""

import json
from pathlib import Path
from typing import Any

from slime_like.errors import DataError
from slime_like.models.tokenization import own_tokenizer


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
