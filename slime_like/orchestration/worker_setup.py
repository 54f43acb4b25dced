"""What Ray starts before a worker that has environment variables of its own: sets them, and becomes that worker.

Ray's own does the same after it has imported Ray, nearly half a second of every trainer rank's start, and then again in
the worker. Whatever else a worker may ask for (another interpreter's prefix, a container) is left to Ray's.

Run as a file, by its path; imports nothing but the standard library.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_CONTEXT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="


def command(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """What to become, and with which variables besides the present ones.

    Args:
        arguments: Ray's: options of a worker's setup among the path of a worker's file and the worker's own options.
    """
    worker = [word for word in arguments if not word.startswith((_CONTEXT, _LANGUAGE))]
    context = next((word.removeprefix(_CONTEXT) for word in arguments if word.startswith(_CONTEXT)), "{}")
    asked = {name: value for name, value in json.loads(context).items() if value}
    if not _plain(asked) or f"{_LANGUAGE}PYTHON" not in arguments:
        return [sys.executable, str(Path(worker[0]).with_name("setup_worker.py")), *arguments], {}
    return [asked.get("py_executable", sys.executable), *worker], asked.get("env_vars", {})


def _plain(asked: Mapping[str, Any]) -> bool:
    """Variables alone, with values that refer to no other ones."""
    values = asked.get("env_vars", {}).values()
    return asked.keys() <= {"env_vars", "py_executable"} and not any("$" in value for value in values)


if __name__ == "__main__":
    words, variables = command(sys.argv[1:])
    os.execve(words[0], words, {**os.environ, **variables})
