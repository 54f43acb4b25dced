"""Examples in the docs run, their configuration is valid, and links, files and keys exist.

Python blocks of ``docs/extending.md`` are whole files named in their first line. They are written to a directory with
the files of ``docs/examples``. The ``try_*.py`` files run there, with the entry points of the TOML blocks installed.
"""

import importlib
import re
import runpy
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from slime_like.checks.check import check
from slime_like.commands.reference import named_parts
from slime_like.config import RunConfig
from slime_like.config.reading.fields import all_fields, sections
from slime_like.config.reading.load import load_config
from slime_like.data.prompts import PromptSource
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.models.tokenization import load_tokenizer
from slime_like.orchestration.run.milestones import TrainSummary

DOCS = Path(__file__).parents[2] / "docs"
FRONT = [DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md"]
_FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#]*)(#[^)]*)?\)")
_REPO_PATH = re.compile(r"`((?:slime_like|backends|rollout|tests|scripts|configs|benchmarks|docs)/[\w./-]*\w/?)`")


def blocks(language: str, page: str = "extending") -> list[str]:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return [textwrap.dedent(found[3]) for found in _FENCE.finditer(text) if found[2] == language]


def named_files(page: str = "extending") -> dict[str, str]:
    """Return the Python blocks by the name in their first line, ``# name.py``."""
    files = {block.partition("\n")[0].removeprefix("# "): block for block in blocks("python", page)}
    assert all(re.fullmatch(r"\w+\.py", name) for name in files), f"a block must begin with its file's name: {files}"
    return files


def extensions() -> dict[str, str]:
    """Return all files that extend something, by name."""
    return named_files() | {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "examples").glob("*.py")}


EXAMPLES = sorted(name for name in extensions() if name.startswith("try_"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write all files to one importable directory, and install the page's entry points."""
    for name, text in extensions().items():
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
    for name in extensions():
        sys.modules.pop(Path(name).stem, None)


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs(example: str, project: Path) -> None:
    runpy.run_path(str(project / example), run_name="__main__")


def test_every_example_is_tried() -> None:
    """Each file has a ``try_*.py``. The run from Python has its own test."""
    tried = {f"try_{name}" for name in extensions() if not name.startswith("try_") and name != "train.py"}
    assert tried == set(EXAMPLES)
    assert len(EXAMPLES) == 8


@pytest.mark.parametrize("block", [*blocks("yaml"), *blocks("yaml", "rewards")], ids=lambda block: block.split(":")[0])
def test_configuration_fragments_are_valid(block: str, tmp_path: Path) -> None:
    fragment = yaml.safe_load(block)
    RunConfig(**{"run_dir": tmp_path, "model": {"path": tmp_path}, **fragment})


def test_a_run_from_python_trains_what_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[RunConfig] = []

    def train(config: RunConfig) -> TrainSummary:
        trained.append(config)
        return TrainSummary(0.25, 0.95, 0, 1.0, 1.0, {"metrics": tmp_path})

    monkeypatch.setattr("slime_like.train.train", train)
    monkeypatch.setattr("slime_like.checks.check.require_valid", trained.append)
    monkeypatch.chdir(DOCS.parent)
    (tmp_path / "train.py").write_text(named_files()["train.py"], encoding="utf-8")
    runpy.run_path(str(tmp_path / "train.py"), run_name="__main__")
    assert [config.run_dir for config in trained] == [DOCS.parent / "runs" / "mine"] * 2


_GSM8K = {
    "A shop sells 48 loaves a day for $23 each. What does it earn?": "It earns 23*48=$<<23*48=1104>>1,104.\n#### 1,104",
    "Mara has 9 pens and loses 4. How many are left?": "There are 9-4=<<9-4=5>>5 left.\n#### 5",
}


def test_getting_started_accepts_published_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's reward and settings work on files in GSM8K's format, with another model."""
    files = named_files("getting_started")
    (settings,) = blocks("yaml", "getting_started")
    for name, text in (files | {settings.partition("\n")[0].removeprefix("# "): settings}).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    make_tiny_model(tmp_path / "SmolLM2-135M-Instruct", family="llama", seed=0)
    (tmp_path / "gsm8k" / "main").mkdir(parents=True)
    rows = [{"question": question, "answer": answer} for question, answer in _GSM8K.items()]
    for split in ("train", "test"):
        file = tmp_path / "gsm8k" / "main" / f"{split}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    monkeypatch.chdir(tmp_path)
    config = load_config(Path("gsm8k.yaml"))
    assert check(config) == []
    tokenizer = load_tokenizer(config.model.path)
    prompts = PromptSource(config.data.train, tokenizer, config.data, config.seed)
    assert prompts.num_rows == 2 and prompts.dropped_prompts == 0
    first = next(prompt for prompt in prompts.next(2) if prompt.answer == "1104")
    text = tokenizer.decode(list(first.input.token_ids))
    assert text.startswith("<system>Solve the problem") and "<user>A shop sells" in text
    correct = runpy.run_path("my_rewards.py")["correct"]
    answers = ("so it is\n#### 1,104", "#### 1104.", "1104", "#### 1105")
    assert [correct("", answer, "1104") for answer in answers] == [1.0, 1.0, 1.0, 0.0]


PAGES = pytest.mark.parametrize("page", [*FRONT, *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.stem)


@PAGES
def test_pages_name_only_files_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    linked = [page.parent / target for target, _ in _LINK.findall(text) if "://" not in target]
    named = [DOCS.parent / path for path in _REPO_PATH.findall(text) if not path.endswith("seed_oss.py")]
    missing = [str(path.relative_to(DOCS.parent)) for path in [*linked, *named] if not path.exists()]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, like GitHub's."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@PAGES
def test_links_lead_to_headings(page: Path) -> None:
    links = _LINK.findall(page.read_text(encoding="utf-8"))
    inside = [(page.parent / target if target else page, anchor[1:]) for target, anchor in links if anchor]
    assert [anchor for target, anchor in inside if target.suffix == ".md" and anchor not in anchors(target)] == []


_SECTIONS = {name.partition(".")[0] for name in sections() if name}
_OF_MODELS = ("model.layers", "model.embed_tokens", "model.norm", "model.safetensors")
_KEY = re.compile(r"`(?:--)?((?:" + "|".join(sorted(_SECTIONS)) + r")(?:\.[a-z_]\w*)+)(?![\w/:]*\.py)[^`]*`")


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_settings_that_pages_name_exist(page: Path) -> None:
    """The last column of the table of other projects' keys has ours."""
    text = page.read_text(encoding="utf-8")
    if page.stem == "coming_from":
        text = re.sub(r"^\|.*\|([^|]*)\|$", r"\1", text, flags=re.MULTILINE)
        assert len(_KEY.findall(text)) > 20
    fields = all_fields()
    free = tuple(f"{name}." for name, field in fields.items() if field.kind == "entries")
    options = {f"{name}.{one.name}" for name, parts in named_parts().items() for part in parts for one in part.options}
    unknown = [key for key in _KEY.findall(text) if key not in (fields.keys() | sections().keys() | options)]
    assert [key for key in unknown if not key.startswith((*free, *_OF_MODELS))] == []
