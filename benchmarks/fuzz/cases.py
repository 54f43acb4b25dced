"""The kinds of input: how each is damaged, and which reader gets it."""

import json
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml

from backends.fsdp.checkpoint import PLAIN_FILES as FSDP_FILES
from backends.megatron.checkpoint_writer import PLAIN_FILES as MEGATRON_FILES
from benchmarks.fuzz.forging import (
    VALUES,
    any_file,
    damage,
    damaged_bytes,
    forge_index,
    forge_json,
    reseal,
    with_mark,
)
from benchmarks.fuzz.sound import ROWS, STEP, Sound
from slime_like.checks.check import require_valid
from slime_like.checks.definition import training_needs
from slime_like.commands.main import main
from slime_like.config import DataConfig
from slime_like.config.reading.load import load_config
from slime_like.data.ledger import FILE_NAME, Ledger
from slime_like.data.prompts import PromptSource
from slime_like.data.tokenizer import load_tokenizer
from slime_like.models.converted import DESCRIPTION, write_description
from slime_like.observability.report.report import REPORT_FILE
from slime_like.orchestration.run.directory import RunDirectory

Read = Callable[[], int]
"""Gives the damaged input to its reader and returns the command's exit code."""
Case = Callable[[Path, Sound, random.Random], Read]
"""Makes a damaged copy in the directory."""


def _command(*arguments: str | Path) -> Read:
    return lambda: main(list(map(str, arguments)))


def _report(directory: Path, sound: Sound, draw: random.Random) -> Read:
    run_dir = shutil.copytree(sound.run, directory / "run")
    for _ in range(draw.randrange(1, 4)):
        damage(any_file(run_dir, draw), draw)
    if draw.random() < 0.2:
        damage(run_dir / FILE_NAME, draw) if (run_dir / FILE_NAME).is_file() else None
        return _command("report", run_dir, "--audit")
    return _command("report", run_dir, "--output", directory / REPORT_FILE)


def _megatron(directory: Path, sound: Sound, draw: random.Random) -> Read:
    checkpoint = shutil.copytree(sound.converted, directory / "converted")
    _forge_trainer(checkpoint / "trainer", MEGATRON_FILES, draw)
    if draw.random() < 0.4:
        for _ in range(draw.randrange(1, 3)):
            _forge_any(checkpoint, draw)
        if draw.random() < 0.5:
            _reseal_description(checkpoint)
    if draw.random() < 0.2:
        return _command("convert", "check", checkpoint, sound.model)
    return _command("convert", "to-hf", checkpoint, directory / "out", "--workers", str(draw.randrange(1, 3)))


def _fsdp(directory: Path, sound: Sound, draw: random.Random) -> Read:
    run_dir = shutil.copytree(sound.resumable("fsdp"), directory / "run", symlinks=True)
    step = run_dir / "checkpoints" / STEP
    _forge_trainer(step / "trainer", FSDP_FILES, draw)
    return _command("convert", "to-hf", step, directory / "out", "--workers", str(draw.randrange(1, 3)))


def _resume(directory: Path, sound: Sound, draw: random.Random) -> Read:
    """Read an earlier run as ``train`` does before Ray starts."""
    run_dir = shutil.copytree(sound.resumable(draw.choice(["megatron", "fsdp"])), directory / "run", symlinks=True)
    step = run_dir / "checkpoints" / STEP
    if draw.random() < 0.5:
        forge_json(step / "state.json", draw)
    else:
        _forge_any(run_dir / "checkpoints", draw)  # not the configuration: a user may name a pipe
    if draw.random() < 0.2:
        latest = run_dir / "checkpoints" / "latest"
        latest.unlink()
        latest.symlink_to(draw.choice(["latest", "step-9", "/etc", "..", STEP]))

    def read() -> int:
        config = load_config(run_dir / "config.yaml", ["--run_dir", str(run_dir)])
        require_valid(config, training_needs(config))
        checkpoint = RunDirectory(config).find_checkpoint()
        if checkpoint is not None:
            ledger = Ledger.begin(directory)
            ledger.restore(checkpoint.file(FILE_NAME), checkpoint.state.get("ledger"))
            ledger.close()
        return 0

    return _as_command(read)


def _hugging_face(directory: Path, sound: Sound, draw: random.Random) -> Read:
    model = shutil.copytree(sound.model, directory / "model")
    for _ in range(draw.randrange(1, 3)):
        _forge_any(model, draw)
    if draw.random() < 0.5:
        return _command("convert", "to-megatron", model, directory / "out", "--workers", "1")

    def read() -> int:
        PromptSource([sound.rows], load_tokenizer(model), DataConfig(), seed=0).next(2)
        return 0

    return _as_command(read)


def _configuration(directory: Path, sound: Sound, draw: random.Random) -> Read:
    path = directory / "config.yaml"
    document = yaml.safe_load(draw.choice(sorted(Path("configs").glob("*.yaml"))).read_text())
    document["run_dir"] = str(directory / "run")
    document.setdefault("model", {})["path"] = str(sound.model)
    document.setdefault("data", {}).update(train=[str(sound.rows)], max_prompt_tokens=48)
    document.setdefault("rollout", {}).update(max_new_tokens=8, max_model_len=None)
    document.pop("evaluation", None)
    for _ in range(draw.randrange(1, 4)):
        document = with_mark(document, draw) if draw.random() < 0.8 else _without(document, draw)
    text = yaml.safe_dump(document) if draw.random() < 0.5 else json.dumps(document, indent=1)
    while (mark := '"\\0value"') in text or (mark := json.dumps("\x00value")) in text:
        value = draw.choice([*VALUES, *_YAML])
        text = text.replace(mark, value if draw.random() < 0.9 else json.dumps(value), 1)
    if draw.random() < 0.2:
        path.write_bytes(damaged_bytes(text.encode(errors="replace"), draw))
    else:
        path.write_text(text, errors="replace")

    def read() -> int:
        config = load_config(path)
        require_valid(config, training_needs(config))
        return 0

    return _as_command(read) if draw.random() < 0.8 else _command("plan", path)


_YAML = [
    "&a [*a]", "!!python/object/apply:os.system ['true']", "*nothing", "<<: 3", "{<<: [1]}", "1e3", "0x10", "1_000",
    "2024-01-01", "~", "|", "? a\n: b", "a: b: c", "\t", "- a", "%YAML 9.9", "nan", ".inf", "-.inf", "'", "auto",
    "{tensor: 1000000000}", "1000000000", "1.5", "/dev/zero", "/", "..", "[a, b, a]", "\x00", "\ud800",
    "[" + "&x [" * 30 + "]" * 30 + "]",
]  # fmt: skip


def _rows(directory: Path, sound: Sound, draw: random.Random) -> Read:
    if draw.random() < 0.7:
        path = directory / "rows.jsonl"
        lines = sound.rows.read_text().splitlines()
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(lines))
            lines[at] = _forged_row(lines[at], draw)
        text = "\n".join(lines).encode(errors="surrogatepass")
        path.write_bytes(damaged_bytes(text, draw) if draw.random() < 0.3 else text)
    else:
        path = directory / "rows.parquet"
        _write_parquet(path, sound, draw)
    changes = {"apply_chat_template": draw.random() < 0.5, "allow_special_tokens": draw.random() < 0.5}
    keys = {
        "environment_key": draw.choice([None, "game", "answer"]),
        "prompt_key": draw.choice(["prompt"] * 9 + ["game.size"]),
    }
    config, supervised = DataConfig(**changes, **keys), draw.random() < 0.3

    def read() -> int:
        PromptSource([path], load_tokenizer(sound.model), config, seed=0, need_responses=supervised).next(50)
        return 0

    return _as_command(read)


def _forged_row(line: str, draw: random.Random) -> str:
    try:
        marked = json.dumps(with_mark(json.loads(line), draw))
    except (ValueError, RecursionError):  # forged before
        return draw.choice(VALUES)
    texts = ['"<eos>"', '"<|im_end|>"', '"{{ 7 * 7 }}"', '"\\u0000"', '"' + "z" * 200_000 + '"', '"\\ud83d\\ude00"']
    return marked.replace(json.dumps("\x00value"), draw.choice([*VALUES, *texts]))


def _write_parquet(path: Path, sound: Sound, draw: random.Random) -> None:
    if draw.random() < 0.5:
        path.write_bytes(damaged_bytes(sound.parquet.read_bytes(), draw))
        return
    columns: dict[str, Any] = {name: [row[name] for row in ROWS[:20]] for name in ROWS[0]}
    cells = [1, None, b"\xff\xfe", 1.5, float("nan"), [1, 2], [["a"]], {"a": {"b": None}}, "<eos>", "", True, 2**62]
    columns[draw.choice([*columns, "input_token_ids", "new"])] = [draw.choice(cells)] * 20
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def _forge_any(directory: Path, draw: random.Random) -> None:
    path = any_file(directory, draw)
    if path.suffix == ".json" and draw.random() < 0.7:
        forge_json(path, draw)
    else:
        damage(path, draw)


def _forge_trainer(trainer: Path, plain: tuple[str, ...], draw: random.Random) -> None:
    """Damage its files or forge its index, and usually give it matching checksums."""
    kind = draw.random()
    if kind < 0.5:
        forge_index(trainer, draw)
    elif kind < 0.9:
        _forge_any(trainer, draw)
    if draw.random() < 0.8:
        reseal(trainer, plain)


def _reseal_description(checkpoint: Path) -> None:
    if not (checkpoint / DESCRIPTION).is_file():
        return
    try:
        facts = json.loads((checkpoint / DESCRIPTION).read_text())
        write_description(checkpoint, {k: v for k, v in facts.items() if k not in ("format", "files", "crc32")})
    except (OSError, ValueError, AttributeError, RecursionError):
        pass  # stays as it was forged


def _without(document: Any, draw: random.Random) -> Any:
    if not isinstance(document, dict) or not document:
        return document
    name = draw.choice(sorted(document))
    inner = document[name]
    if isinstance(inner, dict) and inner and draw.random() < 0.7:
        return {**document, name: _without(inner, draw)}
    return {key: value for key, value in document.items() if key != name}


def _as_command(read: Read) -> Read:
    """Call ``read`` in place of a command, with the error handling of commands."""

    def run() -> int:
        from slime_like.commands import main as entry

        entry._imported = lambda: lambda _: read()  # affects only this case's process
        return main([])

    return run


KINDS: Mapping[str, tuple[float, Case]] = {
    "run directory": (0.25, _report),
    "Megatron checkpoint": (0.15, _megatron),
    "FSDP checkpoint": (0.1, _fsdp),
    "checkpoint to resume": (0.1, _resume),
    "Hugging Face model": (0.1, _hugging_face),
    "configuration": (0.15, _configuration),
    "rows": (0.15, _rows),
}
"""Share of each kind."""
