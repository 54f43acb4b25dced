"""The registry of checks."""

import ast
from pathlib import Path

from slime_like import checks
from slime_like.checks.check import CHECKS


def test_codes_are_unique() -> None:
    codes = [own.code for own in CHECKS]
    assert len(codes) == len(set(codes))


def test_no_check_is_left_out_of_the_registry() -> None:
    """Every public ``*_problems`` of the package is used somewhere in it."""
    (folder,) = map(Path, checks.__path__)
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in folder.glob("*.py")]
    functions = [node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    defined = [name for name in functions if name.endswith("_problems") and name[0] != "_"]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert set(defined) <= used
