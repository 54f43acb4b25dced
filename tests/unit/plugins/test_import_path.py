"""Import paths are judged without importing anything."""

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


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package whose modules must not be executed."""
    folder = tmp_path / "judged_package"
    folder.mkdir()
    (folder / "__init__.py").write_text(SOURCE)
    (folder / "plain.py").write_text(PLAIN)
    (folder / "broken.py").write_text("def (")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder.name


@pytest.mark.parametrize("name", ["function", "Class", "constant", "root"])
def test_what_a_module_binds_is_found_without_importing_it(package: str, name: str) -> None:
    assert import_path_problem(f"{package}.plain:{name}") is None
    assert not any(module.startswith(package) for module in sys.modules)


@pytest.mark.parametrize("name", ["inner", "member", "True"])
def test_what_it_does_not_bind_is_refused(package: str, name: str) -> None:
    problem = import_path_problem(f"{package}.plain:{name}")
    assert problem is not None and problem.endswith(f"plain.py defines no {name}; correct the name")


def test_what_cannot_be_known_is_believed(package: str) -> None:
    assert import_path_problem(f"{package}:sin") is None  # may come from `import *`
    assert import_path_problem("math:sqrt") is None  # no source


@pytest.mark.parametrize("path", ["a:", ":b", "a.b", "a b:c", "a:b.c", "a..b:c"])
def test_what_is_no_import_path(path: str) -> None:
    assert import_path_problem(path) == "is not an import path; give `package.module:name`"


def test_a_module_that_is_no_python_names_its_line(package: str, tmp_path: Path) -> None:
    problem = import_path_problem(f"{package}.broken:anything")
    assert problem is not None
    assert problem.startswith(f"cannot be imported: {tmp_path / package / 'broken.py'}:1: SyntaxError: ")
    assert problem.endswith("; correct it")


def test_the_missing_part_is_named(package: str) -> None:
    problem = import_path_problem(f"{package}.nothing.more:x")
    assert problem is not None and f"there is no module {package}.nothing;" in problem
