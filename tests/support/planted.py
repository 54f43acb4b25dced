"""Bugs put into the code of a running process, and taken out again."""

import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import unwrap
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Edit:
    """A bug: in the source of ``module``, ``old``, which it must have exactly once, becomes ``new``."""

    name: str
    module: str
    old: str
    new: str

    def source(self) -> tuple[str, str]:
        """Return the file and its changed text. A stale row is an error that names it."""
        spec = find_spec(self.module)
        assert spec is not None and spec.origin is not None, f"{self.name}: no module {self.module}; adapt the row"
        text = Path(spec.origin).read_text()
        found = text.count(self.old)
        assert found == 1, f"{self.name}: {self.module} has {self.old!r} {found} times; adapt the row"
        return spec.origin, text.replace(self.old, self.new)


Bug = Edit | Callable[[Patch], None]


def name_of(bug: Bug) -> str:
    return bug.name if isinstance(bug, Edit) else bug.__name__


_BUG = re.compile(r"^(?:([\w.]+): )?([^-+ ].*)\n((?:- .*\n)*)((?:\+ .*\n)*)((?:  .*\n)*)", re.MULTILINE)


def read_bugs(file: Path) -> list[tuple[Edit | str, list[str]]]:
    """Return the bugs in a text file, edits or names, each with the lines of what it must fail."""
    text = re.sub(r"^(#.*)?\n", "", file.read_text(), flags=re.MULTILINE)
    assert not _BUG.sub("", text), f"{file} has other lines than bugs"
    found: list[tuple[Edit | str, list[str]]] = []
    for module, name, *parts, rows in _BUG.findall(text):
        old, new = ("\n".join(line[2:] for line in part.splitlines()) for part in parts)
        found.append((Edit(name, module, old, new) if module else name, [row.strip() for row in rows.splitlines()]))
    return found


@contextmanager
def plant(*bugs: Bug) -> Iterator[None]:
    """Let functions have the code of the changed source inside the block, also where others imported them by name."""
    with ExitStack() as stack:
        for bug in bugs:
            stack.enter_context(_planted(bug))
        yield


@contextmanager
def _planted(bug: Bug) -> Iterator[None]:
    if not isinstance(bug, Edit):
        with pytest.MonkeyPatch.context() as patch:
            bug(patch)
            yield
        return
    file, text = bug.source()
    changed: list[tuple[FunctionType, CodeType]] = []
    _exchange(compile(text, file, "exec", dont_inherit=True), importlib.import_module(bug.module), changed)
    assert changed, f"{bug.name}: no function has other code; adapt the row"
    try:
        yield
    finally:
        for function, code in changed:
            function.__code__ = code


def _exchange(code: CodeType, owner: Any, changed: list[tuple[FunctionType, CodeType]]) -> None:
    """Give the functions of a module or class the code that has their names in ``code``."""
    for inner in code.co_consts:
        if not isinstance(inner, CodeType) or (found := vars(owner).get(inner.co_name)) is None:
            continue
        if isinstance(found, type):
            _exchange(inner, found, changed)
            continue
        for wrapper in ("__func__", "fget", "func"):  # of methods, properties, cached properties
            found = getattr(found, wrapper, found)
        found = unwrap(found)
        is_own = isinstance(found, FunctionType) and found.__code__.co_filename == inner.co_filename
        if is_own and found.__code__ != inner:  # not another's patch
            changed.append((found, found.__code__))
            found.__code__ = inner
