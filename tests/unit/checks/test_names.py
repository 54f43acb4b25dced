"""Names and options in messages, installed engines, and the registry of checks."""

import json
import re
from pathlib import Path

import pytest

from slime_like import checks
from slime_like.checks import engine_install
from slime_like.checks.check import CHECKS
from slime_like.checks.names import reward_problems
from slime_like.config.reading.load import load_config
from slime_like.weights.transports.names import Libraries
from tests.unit.checks.checkpoint import sound_flags


def test_no_credential_of_options_is_printed(tmp_path: Path) -> None:
    options = {"url": "https://u:hidden@h/x?token=hidden", "headers": {"Key": "hidden"}, "no_option": 1}
    functions = json.dumps([{"name": "http", "options": options}])
    config = load_config(None, [*sound_flags(tmp_path), "--reward.functions", functions])
    (problem,) = reward_problems(config.reward)
    assert "'url': 'https://...@h/x?...'" in problem and "hidden" not in problem


@pytest.mark.parametrize(("installed", "expected"), [({}, False), ({"vllm": "0.1"}, True)])
def test_an_engine_is_installed_if_its_package_is(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], expected: bool
) -> None:
    monkeypatch.setattr(engine_install, "_versions", lambda _, __: installed)
    monkeypatch.setattr(engine_install, "find_spec", lambda _: None)
    assert engine_install.is_installed("vllm") is expected
    assert engine_install.is_installed("my.module:engine")  # another check looks for its module


def test_the_packages_of_another_interpreter_are_read_without_starting_it(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    for name, version in (("vllm", "0.33.1"), ("torch", "2.14.1"), ("nvidia_nccl_cu13", "2.30.7")):
        place = tmp_path / "lib" / "python3.12" / "site-packages" / f"{name}-{version}.dist-info"
        place.mkdir(parents=True)
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    assert engine_install.engine_libraries(python) == Libraries("2.14.1", "2.30.7")
    warning = "vllm 0.33.1 has not been tested with rollout.engine=vllm; tested: 0.32"
    assert engine_install.version_warning(python, "vllm") == warning
    assert engine_install.version_warning(python, "sglang") is None
    assert engine_install.engine_libraries(tmp_path / "none" / "bin" / "python") == Libraries("")


def test_codes_are_unique() -> None:
    codes = [own.code for own in CHECKS]
    assert len(codes) == len(set(codes))


def test_every_check_is_used() -> None:
    """Each public ``*_problems`` of the package occurs outside its definition."""
    (folder,) = map(Path, checks.__path__)
    text = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    defined = re.findall(r"^def ([a-z]\w*_problems)", text, re.MULTILINE)
    assert [name for name in defined if len(re.findall(rf"\b{name}\b", text)) < 2] == []
