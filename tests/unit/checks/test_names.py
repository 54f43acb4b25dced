"""What messages about names and options print of them."""

import json
from pathlib import Path

import pytest

from slime_like.checks import engine_install
from slime_like.checks.names import reward_problems
from slime_like.config.reading.load import load_config
from tests.unit.checks.checkpoint import sound_flags


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://u:hid@den@h/x", "https://...@h/x"),
        ("https://u:hidden@h:80/x@y", "https://..."),
        ("https://hid@den@@h", "https://...@h"),
        ("https://u:hid?den@h/x", "https://..."),
        ("https://u:hid#den@h/x", "https://..."),
        ("https://h/x?api_key=hid@den", "https://..."),
        ("https://u:hidden@h/x?token=hidden", "https://...@h/x?..."),
        ("https://h?token=hid@den", "https://..."),
    ],
)
def test_no_credential_of_a_url_is_printed(tmp_path: Path, url: str, shown: str) -> None:
    functions = [{"name": "http", "options": {"url": url, "no_option": 1}}]
    config = load_config(None, [*sound_flags(tmp_path), "--reward.functions", json.dumps(functions)])
    (problem,) = reward_problems(config)
    assert f"'url': '{shown}'" in problem
    assert "hid" not in problem and "den" not in problem


@pytest.mark.parametrize(("packages", "expected"), [({}, False), ({"vllm": "0.1"}, True)])
def test_an_engine_is_installed_where_its_package_is(
    monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], expected: bool
) -> None:
    monkeypatch.setattr(engine_install, "_packages", lambda _: packages)
    monkeypatch.setattr(engine_install, "find_spec", lambda _: None)
    assert engine_install.is_installed("vllm") is expected
    assert engine_install.is_installed("my.module:engine")  # its own module is looked for elsewhere
