"""`slime-like verify template`: exit codes, and what it reads."""

import json
from pathlib import Path

import pytest

from slime_like.commands.main import main
from tests.support import templates
from tests.support.templates import END, tokenizer_of


def checkpoint(directory: Path, template: str, eos: str = END) -> Path:
    """A directory with a tokenizer alone."""
    tokenizer_of(template, eos=eos).save_pretrained(directory)
    return directory


def verify(*arguments: str | Path) -> int:
    return main(["verify", "template", *map(str, arguments), "--histories", "4"])


@pytest.mark.parametrize(("template", "code"), [(templates.SOUND, 0), (templates.DROPS_THINKING, 1)])
def test_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str, code: int) -> None:
    assert verify(checkpoint(tmp_path / "model", template)) == code
    assert ("FAILS" in capsys.readouterr().out) is bool(code)


def test_the_models_own_stop_tokens_count(tmp_path: Path) -> None:
    """``generation_config.json`` decides, and the option over it."""
    model = checkpoint(tmp_path / "model", templates.SOUND, eos="<eos>")
    stop = tokenizer_of(templates.SOUND).convert_tokens_to_ids(END)
    assert verify(model) == 1
    assert verify(model, "--stop-token-ids", str(stop)) == 0
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, stop]}))
    assert verify(model) == 0


def test_a_row_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = checkpoint(tmp_path / "model", templates.DROPS_THINKING), tmp_path / "rows.jsonl"
    thought = [("user", "a"), ("assistant", "<think>q</think>\n\nb"), ("user", "c")]
    rows = [[("user", "a"), ("assistant", "bcd")], thought]
    data.write_text("".join(json.dumps({"chat": [{"role": r, "content": c} for r, c in row]}) + "\n" for row in rows))
    assert verify(model, "--data", data, "--messages_key", "chat") == 1  # the template fails elsewhere
    assert "\u27e6bcd<|im_end|>\u27e7" in capsys.readouterr().out
    assert verify(model, "--data", data, "--messages_key", "chat", "--row", "2") == 1
    assert "[thinking-dropped]" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--row", "2"], "row-without-data"),
        (["--data", "rows.jsonl", "--row", "7"], "no-row"),
        (["--data", "rows.jsonl"], "no-conversation"),
        (["--data", "rows.csv"], "file-type"),
    ],
)
def test_bad_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "a"}\n')
    assert verify(checkpoint(tmp_path / "model", templates.SOUND), *arguments) == 2
    assert capsys.readouterr().err.rstrip().endswith(f"[{code}]")


def test_a_model_without_tokenizer_or_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(tmp_path) == 2
    assert "[no-tokenizer]" in capsys.readouterr().err
    tokenizer_of(None).save_pretrained(tmp_path / "model")
    assert verify(tmp_path / "model") == 2
    assert "[no-chat-template]" in capsys.readouterr().err
