"""Import paths are judged without importing anything."""

import re
import sys
from pathlib import Path

import pytest

from slime_like.plugins.import_path import import_path_problem

SOURCE = """
import os.path as paths
from math import *
raise RuntimeError("imported")
"""
PLAIN = """
from math import sqrt as root
if True:
    def function(): inner = 1
class Class: member = 1
constant: object = print
"""
NO_PATH = "is not an import path; give `package.module:name`"
UNBOUND = r"cannot be found: .*plain\.py defines no {}; correct the name"


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        *((f"judged.plain:{name}", None) for name in ("function", "Class", "constant", "root")),
        *((f"judged.plain:{name}", UNBOUND.format(name)) for name in ("inner", "member", "True")),
        ("judged:sin", None),  # may come from `import *`
        ("math:sqrt", None),  # no source
        *((path, NO_PATH) for path in ("a:", ":b", "a.b", "a b:c", "a:b.c", "a..b:c")),
        ("judged.broken:anything", r"cannot be imported: .*/judged/broken\.py:1: SyntaxError: .*; correct it"),
        ("judged.nothing.more:x", r"cannot be found: there is no module judged\.nothing; .*"),
    ],
)
def test_a_path_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, problem: str | None) -> None:
    folder = tmp_path / "judged"
    folder.mkdir()
    for file, text in (("__init__", SOURCE), ("plain", PLAIN), ("broken", "def (")):
        (folder / f"{file}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = import_path_problem(path)
    assert found is None if problem is None else re.fullmatch(problem, found or "")
    assert not any(module.startswith("judged") for module in sys.modules)
