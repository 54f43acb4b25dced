"""``--output FILE``: whether the file can be written, tried before anything starts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from slime_like.checks.directories import directory_problem


def output_problem(output: Path, read: Mapping[str, Sequence[Path]]) -> str | None:
    """Why the file cannot be written, with the remedy; ``None`` where it can.

    Args:
        read: files that must stay as they are, by the setting that names them.
    """
    if output.is_dir():
        return f"--output {output} is a directory; give a file"
    if not output.absolute().parent.is_dir():
        return f"--output {output}: its directory does not exist; make it first"
    if output.exists() and not output.is_file():
        return f"--output {output} is a device or a pipe, and would be replaced; give a file"
    if (name := _setting_of(output, read)) is not None:
        return f"--output {output} is also given as {name}, and would be replaced; give another file"
    if problem := directory_problem(output.resolve().parent):
        return f"--output {output}: its directory {problem}"
    return None


def _setting_of(output: Path, read: Mapping[str, Sequence[Path]]) -> str | None:
    if not output.exists():
        return None
    return next((name for name, files in read.items() if any(_is_same(output, file) for file in files)), None)


def _is_same(output: Path, file: Path) -> bool:
    return file.exists() and output.samefile(file)
