"""Unexpected errors as one sentence that names the file with the traceback."""

import contextlib
import os
import select
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from slime_like.errors import SlimeLikeError, with_notes
from slime_like.plugins.traceback import causes, full_traceback

_OF_TRAINING = frozenset(
    [
        "torch",
        "ray",
        "grpc",
        "filelock",
        "megatron",
        "transformers",
        "math_verify",
        "pyarrow",
        "matplotlib",
        "tensorboard",
    ]
)
_INSTALL = "install the extra train: pip install -e '.[train]' in the clone"
TRACEBACK_FILE = "traceback.txt"
_LONGEST = 300


class UnforeseenError(SlimeLikeError):
    """An exception that no code made for people: a bug, here or in a library, or a disk or machine that refused."""

    code = "unexpected"


@contextlib.contextmanager
def traceback_kept(run_dir: Path | None) -> Iterator[None]:
    """Turn every other exception than ours into an ``UnforeseenError``, its traceback written to a file. One of ours
    that has the traceback of a user's code gets the name of the file with that.

    Args:
        run_dir: where the file goes, if it exists by then; else the directory for temporary files.

    Raises:
        UnforeseenError: names the exception, its message and the file.
        KeyboardInterrupt: also where a library's import turned one into another exception.
        BrokenPipeError: who read standard output has closed it.
    """
    try:
        yield
    except SlimeLikeError as error:
        text, error.users_traceback = error.users_traceback, None
        if text is not None:
            error.remedy = "; ".join(filter(None, (error.remedy, f"traceback: {_write(text, run_dir)}")))
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _is_closed(sys.stdout):
            raise
        if any(isinstance(link, KeyboardInterrupt) for link in causes(error, contexts=True)):
            raise with_notes(KeyboardInterrupt(), error) from error
        package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if package in _OF_TRAINING:
            raise SlimeLikeError(
                f"the package {package} is not installed", code="package-missing", remedy=_INSTALL
            ) from error
        what = "check that path" if isinstance(error, OSError) else "unexpected error"
        kept = _write(full_traceback(error), run_dir)
        unforeseen = UnforeseenError(_summary(error), remedy=f"{what}; traceback: {kept}")
        raise with_notes(unforeseen, error) from error


def notes_of(error: BaseException) -> list[str]:
    """Sentences that stand behind the error's own."""
    return list(getattr(error, "__notes__", ()))


def _is_closed(stream: TextIO) -> bool:
    """Whether the other end of the pipe behind a stream is closed."""
    poller = select.poll()
    poller.register(stream, 0)
    return any(event & select.POLLERR for _, event in poller.poll(0))


def _summary(error: Exception) -> str:
    """Type and message, on one line; of what the system refused, the file and the reason."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fspath(error.filename)}: {error.strerror}"
    text = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {text[:_LONGEST]}" if text else name


def _write(text: str, run_dir: Path | None) -> str:
    """Write the traceback; where it is, or that no disk takes it, followed by itself."""
    with contextlib.suppress(OSError):
        if run_dir is not None and run_dir.is_dir():
            file = run_dir / TRACEBACK_FILE
            file.write_text(text, encoding="utf-8")
            return str(file)
    try:
        handle, name = tempfile.mkstemp(prefix="slime-like-", suffix="-traceback.txt", text=True)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError:
        return f"no file, since none could be written:\n{text}"
    return name
