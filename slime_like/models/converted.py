"""Checkpoints of `slime-like convert to-megatron`: their contents, and checks of their small files.

The weights have separate checksums, which are compared on reading. This module checks the rest: the model's
configuration and tokenizer, and the description itself. Needs neither torch nor Ray.
"""

import errno
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime_like.system.disk import length_fault
from slime_like.system.words import from_here

WEIGHTS, MODEL, DESCRIPTION = "trainer", "model", "conversion.json"
"""Megatron's files, the rest of the Hugging Face directory, and the description of the source."""

KEPT = "kept"
"""Number of tensors that only the source has."""

CONVERT_AGAIN = "convert the model again"

_FORMAT = 2
_FILES, _OWN = "files", "crc32"


def write_description(checkpoint: Path, facts: Mapping[str, Any]) -> None:
    """Write the description: ``facts``, and length and CRC-32 of every file of the model, which must already exist.

    Raises:
        OSError: the disk rejected the write.
    """
    files = {f"{MODEL}/{file.name}": whole_file(file) for file in sorted((checkpoint / MODEL).iterdir())}
    content = {"format": _FORMAT, **facts, _FILES: files}
    (checkpoint / DESCRIPTION).write_bytes(_text(content | {_OWN: zlib.crc32(_text(content))}))


def leaves_out(model: Path) -> bool:
    """Return whether ``model`` belongs to a conversion that left out tensors outside the language model."""
    file = model.parent / DESCRIPTION
    return model.name == MODEL and file.is_file() and bool(json.loads(file.read_bytes()).get(KEPT))


def is_converted(checkpoint: Path) -> bool:
    """Return whether this is a converted checkpoint, even a damaged one, and not a run's."""
    has_both = (checkpoint / WEIGHTS).is_dir() and (checkpoint / MODEL).is_dir()
    return (checkpoint / DESCRIPTION).is_file() or (has_both and not (checkpoint / "state.json").is_file())


def training_checkpoint(path: Path) -> Path | None:
    """Return the converted or run checkpoint that ``path`` or its parent is; ``None`` for everything else."""
    root = path.parent if path.name == WEIGHTS else path
    if (path / "config.json").is_file() or not (root / WEIGHTS).is_dir():
        return None
    return root if is_converted(root) or (root / "state.json").is_file() else None


def what_instead(directory: Path) -> str:
    """Say what a directory without a ``config.json`` is, with the remedy."""
    if not directory.exists():
        return f" does not exist{from_here(directory)}; give a Hugging Face checkpoint directory"
    checkpoint = training_checkpoint(directory)
    if checkpoint is None:
        return ": contains no config.json; give a Hugging Face checkpoint directory"
    return (
        f" is a training checkpoint; give the Hugging Face directory it was made from and model.weights={checkpoint}, "
        "or convert it with `slime-like convert to-hf`"
    )


def damage_remedy(weights: Path, otherwise: str) -> str:
    """Return the remedy for damage in ``weights``, Megatron's files; ``otherwise`` if a run wrote them."""
    return CONVERT_AGAIN if weights.name == WEIGHTS and is_converted(weights.parent) else otherwise


def converted_problem(checkpoint: Path) -> str | None:
    """Describe damaged or missing small files, with the remedy; ``None`` if there are none."""
    faults = ", ".join(_faults(checkpoint))
    return f"is damaged ({faults}); restore the files, or {CONVERT_AGAIN}" if faults else None


def _faults(checkpoint: Path) -> Iterator[str]:
    if not (checkpoint / DESCRIPTION).is_file():  # reading a pipe would never end
        yield f"{DESCRIPTION} is missing"
        return
    try:
        text = (checkpoint / DESCRIPTION).read_bytes()
        content = json.loads(text)
        checksum, files = content.pop(_OWN), content[_FILES].items()
        whole = checksum == zlib.crc32(_text(content)) and text == _text(content | {_OWN: checksum})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        yield f"{DESCRIPTION} has changed"
        return
    for name, written in files:
        try:
            found = whole_file(checkpoint / name)
            if found != written:
                yield f"{name} {length_fault(found[0], written[0]) or 'has changed'}"
        except FileNotFoundError:
            yield f"{name} is missing"
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror or error}"


def whole_file(path: Path) -> list[int]:
    """Return length and CRC-32 (ISO 3309) of a small file. Raises ``OSError``, also for a pipe: it never ends."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    content = path.read_bytes()
    return [len(content), zlib.crc32(content)]


def _text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
