"""Published models, and commands from the repository's root, where their recipes name files."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every module that imports it."""
    monkeypatch.chdir(ROOT)


def with_fewer_layers(directory: Path, model: str, layers: int) -> Path:
    """Write the model's ``config.json`` into ``directory`` with so many of its layers, which are all alike."""
    published = json.loads((ROOT / "configs" / "models" / model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**published, "num_hidden_layers": layers}))
    return directory
