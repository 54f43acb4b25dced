"""The examples of ``docs/extending.md`` run, and its configuration fragments are valid.

Python blocks are whole files named in their first line; they are written to a directory and the ``try_*.py`` ones are
executed, with the entry points of the TOML blocks installed beside them. Each example states what it proves.
"""

import importlib
import re
import runpy
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from slime_like.config import RunConfig
from slime_like.plugins.entry_points import BACKEND_GROUP, ENGINE_GROUP

DOCS = Path(__file__).parents[2] / "docs"
_FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
_REPO_PATH = re.compile(r"`((?:slime_like|backends|rollout|tests|scripts|configs|benchmarks|docs)/[\w./-]*\w/?)`")


def blocks(language: str) -> list[str]:
    text = (DOCS / "extending.md").read_text(encoding="utf-8")
    return [textwrap.dedent(found[3]) for found in _FENCE.finditer(text) if found[2] == language]


def named_files() -> dict[str, str]:
    """Python blocks by the name in their first line: ``# name.py``."""
    files = {block.partition("\n")[0].removeprefix("# "): block for block in blocks("python")}
    assert all(re.fullmatch(r"\w+\.py", name) for name in files), f"a block must begin with its file's name: {files}"
    return files


EXAMPLES = sorted(name for name in named_files() if name.startswith("try_"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """All files of the page in one importable directory, its entry points installed; forgotten afterwards."""
    for name, text in named_files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    installed = tmp_path / "example-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: example\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        "\n".join(block.replace('"', "").replace("project.entry-points.", "") for block in blocks("toml"))
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for the reward workers
    importlib.invalidate_caches()
    yield tmp_path
    for name in named_files():
        sys.modules.pop(Path(name).stem, None)


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs(example: str, project: Path) -> None:
    runpy.run_path(str(project / example), run_name="__main__")


def test_every_example_is_tried() -> None:
    """A file that no ``try_*.py`` stands beside would rot unseen."""
    assert {f"try_{name}" for name in named_files() if not name.startswith("try_")} == set(EXAMPLES)
    assert len(EXAMPLES) == 8


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.split(":")[0])
def test_configuration_fragments_are_valid(block: str, tmp_path: Path) -> None:
    fragment = yaml.safe_load(block)
    RunConfig(**{"run_dir": tmp_path, "model": {"path": tmp_path}, **fragment})


def test_entry_point_groups_are_those_that_are_looked_up() -> None:
    groups = [group for block in blocks("toml") for group in tomllib.loads(block)["project"]["entry-points"]]
    assert sorted(groups) == sorted([ENGINE_GROUP, BACKEND_GROUP])


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_pages_name_only_files_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    linked = [page.parent / target for target in _LINK.findall(text) if "://" not in target]
    named = [DOCS.parent / path for path in _REPO_PATH.findall(text) if not path.endswith("seed_oss.py")]
    missing = [str(path.relative_to(DOCS.parent)) for path in [*linked, *named] if not path.exists()]
    assert missing == []


def test_messages_that_troubleshooting_explains_exist() -> None:
    """The first column quotes fragments of messages; each must stand in the sources as it is quoted."""
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    fragments = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    root = DOCS.parent
    files = [file for folder in ("slime_like", "backends", "rollout") for file in (root / folder).rglob("*.py")]
    sources = "\n".join(file.read_text(encoding="utf-8") for file in [*files, root / "scripts" / "environment.sh"])
    assert len(fragments) > 10
    assert [fragment for fragment in fragments if fragment not in sources] == []


def test_figures_that_pages_name_are_logged() -> None:
    """Names of metrics, as ``slime_like/observability`` composes them."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    named = set(re.findall(r"`((?:train_actor_\w+|ref_actor_\w+|weights)/[\w ]+)`", pages))
    folder = DOCS.parent / "slime_like" / "observability"
    source = "".join((folder / module).read_text(encoding="utf-8") for module in ("names.py", "aliases.py"))
    assert len(named) >= 4
    assert [name for name in named if name.split("/")[0] not in source or name.split("/")[1] not in source] == []
