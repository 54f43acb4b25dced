"""Unexpected errors as one sentence that names the file with the traceback."""

import contextlib
import errno
import os
import select
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

from slime_like.errors import SlimeLikeError, with_notes
from slime_like.plugins.resolve import causes

TRACEBACK_FILE = "traceback.txt"
_LONGEST = 300


class UnforeseenError(SlimeLikeError):
    """An exception that was not written for users: a bug, here or in a library, or a fault of the disk or machine."""

    code = "unexpected"


@contextlib.contextmanager
def keep_traceback(run_dir: Path | None) -> Iterator[None]:
    """Turn exceptions that aren't ours into an ``UnforeseenError``. Write tracebacks of bugs and user code to a file.

    The file is in ``run_dir``, if that exists by then, else in the directory for temporary files. The error names it.
    A ``KeyboardInterrupt`` that a library's import turned into another exception stays one, and a ``BrokenPipeError``
    passes if the reader of standard output closed it.
    """
    try:
        yield
    except SlimeLikeError as error:
        text, error.users_traceback = error.users_traceback, None
        if text is not None:
            error.remedy = "; ".join(filter(None, (error.remedy, f"traceback: {_write(text, run_dir)}")))
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError):
            output = select.poll()
            output.register(sys.stdout, 0)
            if any(event & select.POLLERR for _, event in output.poll(0)):  # its reader has closed it
                raise
        if any(isinstance(link, KeyboardInterrupt) for link in causes(error)):
            raise with_notes(KeyboardInterrupt(), error) from error
        if isinstance(error, ModuleNotFoundError):
            remedy = "install it; the extra train has all that training needs: pip install -e '.[train]' in the clone"
            raise SlimeLikeError(str(error), code="package-missing", remedy=remedy) from error
        what = "check that path" if isinstance(error, OSError) else "unexpected error"
        remedy = f"{what}; traceback: {_write(''.join(traceback.format_exception(error)), run_dir)}"
        name, text = type(error).__name__, " ".join(str(error).split())
        summary = f"{name}: {text[:_LONGEST]}" if text else name
        if isinstance(error, OSError) and error.filename is not None:
            summary = f"{os.fspath(error.filename)}: {error.strerror}"
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        code = "disk-refused" if full else None
        raise with_notes(UnforeseenError(summary, code=code, remedy=remedy), error) from error


def _write(text: str, run_dir: Path | None) -> str:
    """Write the traceback and return the file's path, or the traceback itself if no file can be written."""
    with contextlib.suppress(OSError):
        if run_dir is not None and run_dir.is_dir():
            file = run_dir / TRACEBACK_FILE
            file.write_text(text, encoding="utf-8")
            return str(file)
    with contextlib.suppress(OSError):
        handle, name = tempfile.mkstemp(prefix="slime-like-", suffix="-traceback.txt")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        return name
    return f"no file, since none could be written:\n{text}"
