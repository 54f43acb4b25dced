"""Encoded rows on disk, so later starts need not encode them again: Arrow files, mapped into memory."""

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from datetime import date
from importlib.metadata import version
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from slime_like.config import DataConfig
from slime_like.data.encoding import EncodedRow
from slime_like.errors import SlimeLikeError
from slime_like.interfaces.samples import PromptInput
from slime_like.models import tokenization
from slime_like.system.disk import file_digest, refusal

_KEPT_FILES = 32
"""Files in the directory. A new one replaces the one that was not used for the longest time."""
_BATCH_ROWS = 1024
_SCHEMA = pyarrow.schema([("token_ids", pyarrow.list_(pyarrow.int32())), ("others", pyarrow.large_string())])
_OTHERS = [field.name for field in fields(EncodedRow) if field.name != "input"]
_CODE = [Path(tokenization.__file__), *sorted(Path(__file__).parent.glob("*.py"))]


class CachedRows(Sequence[EncodedRow]):
    """Rows of a file that ``write_rows`` made. A row takes memory only after it is read.

    Attributes:
        facts: figures about all rows, as given to ``write_rows``.
    """

    def __init__(self, path: Path) -> None:
        *self._batches, last = pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all().to_batches()
        self.facts: dict[str, int] = json.loads(last["others"][0].as_py())

    def __len__(self) -> int:
        return sum(batch.num_rows for batch in self._batches)

    def __getitem__(self, index: Any) -> Any:
        ids, others = (column[index % _BATCH_ROWS] for column in self._batches[index // _BATCH_ROWS].columns)
        *rest, arrays = json.loads(others.as_py())
        given = dict(zip(_OTHERS, rest, strict=True))
        spans, response = given["spans"], given["response_tokens"]
        given["response_tokens"] = None if response is None else array("i", response)
        given |= {"forks": tuple(given["forks"]), "spans": None if spans is None else tuple(map(tuple, spans))}
        by_name = {name: np.asarray(values, dtype) for name, (dtype, values) in arrays.items()}
        return EncodedRow(PromptInput(array("i", ids.values.to_numpy().tobytes()), by_name), **given)

    def prompts(self) -> Iterator[np.ndarray]:
        """Yield the token ids of every prompt, (n,) int32, in order."""
        for column in (batch["token_ids"] for batch in self._batches):
            yield from (column.values.to_numpy()[start:end] for start, end in pairwise(column.offsets.to_numpy()))


def cached_rows(directory: Path, key: str, notes: list[str]) -> CachedRows | None:
    """Return the rows with this key if there are any. A damaged file is removed, which is added to ``notes``.

    A file's name has the key of its rows and the checksum of its bytes.
    """
    for path in directory.glob(f"{key}.*.arrow"):
        if path.name == f"{key}.{file_digest(path)}.arrow":
            path.touch()
            return CachedRows(path)
        notes.append(f"{path} was damaged, so its rows were encoded again")
        path.unlink(missing_ok=True)
    return None


def write_rows(
    directory: Path, key: str, rows: Iterable[EncodedRow], facts: Callable[[], dict[str, int]]
) -> CachedRows:
    """Write the rows in batches, and return them from disk. The file appears once it is complete.

    ``facts`` is called after the last row. Raises ``SlimeLikeError`` if the disk refuses.
    """
    partial, rest = directory / f"{key}.{os.getpid()}.partial", iter(rows)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with pyarrow.OSFile(str(partial), "wb") as file, pyarrow.ipc.new_file(file, _SCHEMA) as writer:
            while batch := list(islice(rest, _BATCH_ROWS)):
                ids = [np.asarray(row.input.token_ids, np.int32) for row in batch]
                texts = list(map(_as_text, batch))
                writer.write_batch(pyarrow.record_batch([ids, texts], _SCHEMA))
            writer.write_batch(pyarrow.record_batch([[[]], [json.dumps(facts())]], _SCHEMA))
        path = partial.replace(directory / f"{key}.{file_digest(partial)}.arrow")
    except OSError as error:
        raise SlimeLikeError(refusal(partial, str(error)), code="disk-refused", who="data.cache_dir") from error
    finally:
        if partial.exists():
            partial.unlink()
    for old in sorted(directory.iterdir(), key=lambda file: file.lstat().st_mtime)[:-_KEPT_FILES]:
        old.unlink(missing_ok=True)
    return CachedRows(path)


def _as_text(row: EncodedRow) -> str:
    arrays = {name: (values.dtype.str, values.tolist()) for name, values in row.input.fields.items()}
    return json.dumps([*(getattr(row, name) for name in _OTHERS), arrays], default=list)


def rows_key(tokenizer: Any, config: DataConfig, *others: Any) -> str | None:
    """Return a digest of all that decides how rows are encoded: tokenizer, template, settings, ``others`` and our code.

    Returns ``None`` if the tokenizer has no files.
    """
    directory, template = Path(tokenizer.name_or_path), json.dumps(tokenizer.chat_template)
    if not (files := tokenization.tokenizer_files(directory)):
        return None
    settings = config.model_dump(mode="json", exclude={"train", "mixture", "shuffle", "cache_dir"})
    read = [file_digest(file) for file in (*files, *directory.glob("config.json"), *_CODE)]
    versions = [version(name) for name in ("transformers", "tokenizers", "jinja2")]
    today = date.today().isoformat() if "strftime_now" in template else ""
    return hashlib.sha256(json.dumps([template, settings, read, versions, today, others]).encode()).hexdigest()[:32]
