"""Durable writes, and sentences about a disk that refuses them or a file that lost bytes."""

import itertools
import os
import secrets
import shutil
from contextlib import suppress
from io import FileIO
from pathlib import Path


def refusal(path: Path, reason: str) -> str:
    """Describe a failed write: the path, the reason, the free space and the remedy."""
    return (
        f"{path}: could not be written ({reason}; {_room(path)}); free space there, and restart "
        "to resume from the last checkpoint"
    )


def length_fault(found: int, written: int) -> str | None:
    """Describe a file of ``found`` bytes of which ``written`` were written; follows its name."""
    if found == written:
        return None
    if found > written:
        return f"has {found} bytes, though {written} were written"
    return f"is {'cut off' if found else 'empty'}: it has {found} of the {written} bytes that were written"


def _room(path: Path) -> str:
    try:
        usage = shutil.disk_usage(next(place for place in (path, *path.absolute().parents) if place.exists()))
    except OSError as error:  # the disk is gone
        return f"free space is unknown: {error.strerror or error}"
    return f"{usage.free} of {usage.total} bytes are free"


def replace_directory(partial: Path, directory: Path) -> None:
    """Put ``partial`` in the place of ``directory``; what was there is moved aside first, then removed."""
    old = directory.parent / f".{directory.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    sync(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Make a file, or a directory's names, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_log(directory: Path, role: str) -> FileIO:
    """Create the first of ROLE.log, ROLE.2.log and so on that does not exist; open for appending and reading."""
    names = itertools.chain([f"{role}.log"], (f"{role}.{number}.log" for number in itertools.count(2)))
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL
    while True:
        with suppress(FileExistsError):
            return FileIO(str(directory / next(names)), "a+", opener=lambda path, _: os.open(path, flags, 0o644))


def link_tree(source: Path, target: Path) -> None:
    """The files of ``source`` under new names, without a copy where the file system has such links.

    Raises:
        OSError: the disk refused.
    """

    def link_or_copy(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without links; what hinders a copy, too, is raised by it
            shutil.copyfile(source, target)

    shutil.copytree(source, target, copy_function=link_or_copy)


def sync_tree(directory: Path) -> None:
    """Make all files below a directory durable, and their names."""
    for place, _, files in os.walk(directory, topdown=False):
        for name in files:
            sync(Path(place, name))
        sync(Path(place))


def write_private(path: Path, text: str) -> None:
    """Write a file, whole or not at all, that only its owner may read; its directory is made where there is none.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
        stream.write(text)
    draft.replace(path)
