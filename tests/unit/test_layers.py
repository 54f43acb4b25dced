"""The layers of the system: an import goes down only, and no folder's parts import each other in a circle."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("slime_like", "backends", "rollout")

# From the top down; rooms of one layer do not import each other. A room is a module or a package.
LAYERS = (
    "slime_like.commands",
    "slime_like.train slime_like.evaluate slime_like.score slime_like.verification slime_like.launch",
    "slime_like.planning",
    "slime_like.orchestration.run",
    "slime_like.orchestration.weight_sync",
    "slime_like.orchestration.rollout",
    "slime_like.orchestration.trainer",
    "slime_like.orchestration.cluster",
    "backends.megatron backends.fsdp rollout",
    "backends.common",
    "slime_like.checks slime_like.conversion",
    "slime_like.agents slime_like.data slime_like.weights slime_like.hosting slime_like.sandbox slime_like.examples"
    " slime_like.observability",
    "slime_like.algorithms slime_like.interfaces",
    "slime_like.config slime_like.models",
    "slime_like.plugins slime_like.statistics",
    "slime_like.trajectory slime_like.errors slime_like.system",
)
LEVELS = {room: -level for level, rooms in enumerate(LAYERS) for room in rooms.split()}
FACES = {face: -len(LAYERS) for face in ("slime_like", "slime_like.orchestration", "backends")}
"""Packages around the rooms: below all of them, so that their ``__init__`` imports nothing."""


@cache
def imports() -> dict[str, set[str]]:
    """Module -> modules it imports, anywhere in the file."""
    files = {path: path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    modules = {".".join(name.with_suffix("").parts).removesuffix(".__init__"): path for path, name in files.items()}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        assert not any(isinstance(node, ast.ImportFrom) and node.level for node in nodes), f"{path}: relative import"
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= (members & modules.keys()) or {node.module}
        graph[module] = names & (modules.keys() - {module})
    return graph


@pytest.fixture(scope="module", autouse=True)
def _read() -> None:
    """Outside any test's second."""
    imports()


def _room(module: str) -> str:
    """The longest prefix of ``module`` that the table names."""
    parts = module.split(".")
    rooms = [prefix for end in range(len(parts), 0, -1) if (prefix := ".".join(parts[:end])) in LEVELS]
    assert rooms or module in FACES, f"{module} is in no layer; add its room to LAYERS"
    return rooms[0] if rooms else module


def test_every_import_goes_down() -> None:
    levels = LEVELS | FACES
    upward = {
        f"{module} -> {imported}"
        for module, names in imports().items()
        for imported in names
        if (here := _room(module)) != (there := _room(imported)) and levels[there] >= levels[here]
    }
    assert upward == set()


FILES = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
FOLDERS = sorted({str(folder) for path in FILES for folder in path.parents})


@pytest.mark.parametrize("folder", FOLDERS)
def test_parts_of_a_folder_import_each_other_without_a_circle(folder: str) -> None:
    """Parts are the files and folders directly inside."""
    prefix = [] if folder == "." else folder.split("/")
    parts: dict[str, set[str]] = {}
    for module, names in imports().items():
        here = module.split(".")
        if here[: len(prefix)] != prefix or len(here) == len(prefix):
            continue
        others = (name.split(".") for name in names)
        inside = {other[len(prefix)] for other in others if other[: len(prefix)] == prefix and len(other) > len(prefix)}
        parts.setdefault(here[len(prefix)], set()).update(inside - {here[len(prefix)]})
    try:
        TopologicalSorter(parts).prepare()
    except CycleError as error:
        pytest.fail(f"{folder}: {' -> '.join(reversed(error.args[1]))}")


def test_the_top_of_the_package() -> None:
    top = {path.name for path in (ROOT / "slime_like").glob("*.py")}
    assert top == {"__init__.py", "errors.py", "evaluate.py", "score.py", "statistics.py", "train.py", "trajectory.py"}
