"""Optional parts: the table names what exists. It is text, so no other check reads it."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from slime_like.plugins.options import OPTIONS


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_defined_where_the_table_says(name: str) -> None:
    module, _, attribute = OPTIONS[name].partition(":")
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    body = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
    named = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert attribute in named | {
        target.id
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
