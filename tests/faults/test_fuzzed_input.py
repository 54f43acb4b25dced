"""Damaged and forged checkpoints, run directories, models, configurations and rows are read without a fault.

    FUZZ=0:5000 FUZZ_DIR=runs/fuzz python -m pytest -s -m acceptance tests/faults/test_fuzzed_input.py

``FUZZ`` is a range of numbers, each the seed of an input. Its reader must end with exit code 0, or with 1 or 2 and a
message with a code, without a traceback, in 10 s of processor time and 2 GB of memory. Others stay in ``FUZZ_DIR``.
"""

import json
import os
import pickle
import random
import re
import resource
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml

from backends.common.checkpoint.integrity import ByteRange, Checksums, is_file_name
from slime_like.checks import training_needs
from slime_like.checks.check import require_valid
from slime_like.commands import main as entry
from slime_like.config import DataConfig
from slime_like.config.reading.load import load_config
from slime_like.data.ledger import FILE_NAME, Ledger
from slime_like.data.prompts import PromptSource
from slime_like.models.converted import DESCRIPTION, write_description
from slime_like.models.tokenization import load_tokenizer
from slime_like.orchestration.run.directory import RunDirectory
from tests.conftest import Tiny
from tests.faults.quick import quick
from tests.support.forged import Program, pieces_of, torchs_index
from tests.support.forked_command import ForkedCommand, worker_server
from tests.support.processes import succeed

CPU_S, HANG_S, MEMORY_BYTES = 10, 60.0, 2 * 10**9
BACKENDS = ("megatron", "fsdp")
MARK = "\x00value"
JSON = [
    "null", "true", "3", "0", "5e-324", "1e308", "-1e308", "1e999", "NaN", "-Infinity", "1" * 400, "1" * 5000, '""',
    '"text"', "[]", "{}", "[1, [2]]", '{"a": 1}', "[" * 100_000, '{"a":' * 5_000, "[" * 600 + "]" * 600, '"\\ud800"',
    '"\\u0000"', '"<eos>"', '"<|im_end|>"', '"{{ 7 * 7 }}"', '"' + "x" * 10_000 + '"',
]  # fmt: skip
YAML = [
    "&a [*a]", "!!python/object/apply:os.system ['true']", "*nothing", "<<: 3", "{<<: [1]}", "1e3", "0x10", "|",
    "2024-01-01", "~", "? a\n: b", "a: b: c", "\t", "- a", "%YAML 9.9", "nan", "-.inf", "'", "auto", "10000000",
    "/dev/zero", "/", "..", "{tensor: 1000000000}", "[a, b, a]", "\x00", "\ud800", "[" + "&x [" * 30 + "]" * 30 + "]",
]  # fmt: skip
OBJECTS: list[Any] = [
    -1, 0, 1, 3, 2**31, 2**62, 2**70, None, "", "..", "/etc/passwd", "../state.json", ".metadata", "a\x00b", "x" * 999,
    [], [3], ["zstd"], {}, torch.int8, torch.complex128, *map(torch.Size, ([0], [2**62], [1, 3, 2**31])),
]  # fmt: skip
CELLS = [1, None, b"\xff\xfe", 1.5, float("nan"), [1, 2], [["a"]], {"a": {"b": None}}, "<eos>", "", True, 2**62]
ROWS: list[dict[str, Any]] = [
    {"prompt": f"{i}+{i}=", "answer": str(2 * i), "response": str(2 * i), "game": {"size": i, "moves": ["a", "b"]}}
    for i in range(20)
]
CHAT = {"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}], "answer": 2}


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Cut off, overwrite in the middle, or replace by a few bytes."""
    at, some = draw.randrange(len(content) + 1), draw.randbytes(draw.randrange(1, 9))
    return draw.choice([content[:at], content[:at] + some + content[at + len(some) :], some])


def damage(directory: Path, draw: random.Random) -> None:
    """Change a value in a JSON file of the directory, or remove a file or change its bytes, length or type."""
    path = draw.choice(sorted(each for each in directory.rglob("*") if each.is_file() and not each.is_symlink()))
    content, kind = path.read_bytes(), draw.randrange(10)
    if path.suffix == ".json" and draw.random() < 0.7:
        path.write_text(forged(content.decode(errors="replace"), draw))
        return
    path.unlink()
    if kind == 1:
        path.mkdir()
    elif kind == 2:
        os.mkfifo(path)
    elif kind == 3:
        path.symlink_to(draw.choice([path, Path("/nowhere"), path.parent]))
    elif kind == 4:
        path.write_bytes(content + draw.choice([b"\0" * 5000, content, b"{}"]))
    elif kind > 4:
        path.write_bytes(damaged(content, draw))


def marked(value: Any, draw: random.Random) -> Any:
    """Return the document with a mark instead of one of its values, at any depth, or without it."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice([*value, "new"])
        if draw.random() < 0.1:
            return {key: kept for key, kept in value.items() if key != name}
        return {**value, name: marked(value.get(name), draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        return [*value[:at], marked(value[at], draw), *value[at + 1 :]]
    return MARK


def forged(text: str, draw: random.Random) -> str:
    """Replace one value of a JSON document."""
    try:
        text = json.dumps(marked(json.loads(text), draw))
    except (ValueError, RecursionError):  # forged before
        return draw.choice(JSON)
    return text.replace(json.dumps(MARK), draw.choice(JSON))


def forge_trainer(trainer: Path, draw: random.Random) -> None:
    """Set an attribute in torch's index or damage a file, and usually make the checksums match."""
    if (kind := draw.random()) < 0.5:
        index = torchs_index(trainer)
        entries = draw.choice([index.state_dict_metadata, index.storage_data])
        key = draw.choice(list(entries))
        entry = entries[key]
        target = draw.choice([entry, getattr(entry, "properties", entry), *getattr(entry, "chunks", [])])
        if kind < 0.05 or not vars(target):
            index.planner_data = Program(trainer / "executed")
        elif kind < 0.15:
            entries[draw.choice(["new", "model.new", 3, key])] = draw.choice([entries.pop(key), None, 3])
        else:
            object.__setattr__(target, draw.choice(list(vars(target))), draw.choice(OBJECTS))
        (trainer / ".metadata").write_bytes(pickle.dumps(index))
    elif kind < 0.9:
        damage(trainer, draw)
    if draw.random() < 0.8:
        reseal(trainer)
    (trainer / "executed").unlink(missing_ok=True)  # torch's own reader has run the program


def reseal(trainer: Path) -> None:
    """Give the directory checksums of what it has."""
    pieces: dict[str, list[ByteRange]] = {}
    with suppress(Exception):  # forged: torch's reader raises whatever it meets
        pieces = {name: found for name, found in pieces_of(trainer).items() if is_file_name(name)}
    files = [each.name for each in trainer.iterdir() if each.is_file() and each.suffix != ".distcp"]
    with suppress(OSError):  # the checksums are a directory or a link
        Checksums.of_directory(trainer, pieces, [name for name in files if name != "checksums.json"]).write()


def command(*arguments: str | Path) -> int:
    return entry.main(list(map(str, arguments)))


def reads(read: Callable[[], object]) -> int:
    """Call ``read`` as a command, with the commands' handling of errors. This process does nothing else."""
    entry._imported = lambda: lambda _: int(read() is NotImplemented)
    return entry.main([])


def read_run(directory: Path, sound: Path, draw: random.Random) -> int:
    ignored = shutil.ignore_patterns("checkpoints", "worker_logs", "hf")
    run_dir = shutil.copytree(sound / draw.choice(BACKENDS), directory / "run", ignore=ignored)
    for _ in range(draw.randrange(1, 4)):
        damage(run_dir, draw)
    flags = ["--audit"] if draw.random() < 0.3 else ["--output", directory / "report.html"]
    return command("report", run_dir, *flags)


def read_converted(directory: Path, sound: Path, draw: random.Random) -> int:
    checkpoint = shutil.copytree(sound / "converted", directory / "converted")
    forge_trainer(checkpoint / "trainer", draw)
    if draw.random() < 0.4:
        damage(checkpoint, draw)
    if draw.random() < 0.2:
        with suppress(OSError, ValueError, AttributeError, RecursionError):  # else it stays as it was forged
            facts = json.loads((checkpoint / DESCRIPTION).read_text())
            write_description(checkpoint, {k: v for k, v in facts.items() if k not in ("format", "files", "crc32")})
    if draw.random() < 0.2:
        return command("convert", "check", checkpoint, sound / "model")
    return command("convert", "to-hf", checkpoint, directory / "out", "--workers", str(draw.randrange(1, 3)))


def read_checkpoint(directory: Path, sound: Path, draw: random.Random) -> int:
    """Convert a run's checkpoint, or read the run as ``train`` does before Ray starts."""
    run_dir = shutil.copytree(sound / draw.choice(BACKENDS), directory / "run", symlinks=True)
    latest = run_dir / "checkpoints" / "latest"
    if draw.random() < 0.5:
        forge_trainer(latest / "trainer", draw)
        return command("convert", "to-hf", latest.resolve(), directory / "out", "--workers", "1")
    damage(latest.parent, draw)
    if draw.random() < 0.2:
        latest.unlink()
        latest.symlink_to(draw.choice(["latest", "step-9", "/etc", "..", "step-000002"]))

    def read() -> None:
        config = load_config(run_dir / "config.yaml", ["--run_dir", str(run_dir), "--steps", "9"])
        require_valid(config, training_needs(config))
        if (checkpoint := RunDirectory(config).find_checkpoint()) is not None:
            ledger = Ledger.begin(directory)
            ledger.restore(checkpoint.file(FILE_NAME), checkpoint.state.get("ledger"))
            ledger.close()

    return reads(read)


def read_model(directory: Path, sound: Path, draw: random.Random) -> int:
    model = shutil.copytree(sound / "model", directory / "model")
    for _ in range(draw.randrange(1, 3)):
        damage(model, draw)
    if draw.random() < 0.5:
        return command("convert", "to-megatron", model, directory / "out", "--workers", "1")
    rows = [sound / "rows.jsonl"]
    return reads(lambda: PromptSource(rows, load_tokenizer(model), DataConfig(), seed=0).next(2))


def read_configuration(directory: Path, sound: Path, draw: random.Random) -> int:
    path = directory / "config.yaml"
    document = yaml.safe_load(draw.choice(sorted(Path("configs").glob("*.yaml"))).read_text())
    document["run_dir"] = str(directory / "run")
    document.setdefault("model", {})["path"] = str(sound / "model")
    document.setdefault("data", {}).update(train=[str(sound / "rows.jsonl")], max_prompt_tokens=48)
    document.setdefault("rollout", {}).update(max_new_tokens=8, max_model_len=None)
    document.pop("evaluation", None)
    for _ in range(draw.randrange(1, 4)):
        document = marked(document, draw)
    text = yaml.safe_dump(document) if draw.random() < 0.5 else json.dumps(document, indent=1)
    while (mark := '"\\0value"') in text or (mark := json.dumps(MARK)) in text:
        value = draw.choice([*JSON, *YAML])
        text = text.replace(mark, value if draw.random() < 0.9 else json.dumps(value), 1)
    content = text.encode(errors="replace")
    path.write_bytes(damaged(content, draw) if draw.random() < 0.2 else content)
    if draw.random() < 0.2:
        return command("plan", path)
    return reads(lambda: require_valid(config := load_config(path), training_needs(config)))


def read_rows(directory: Path, sound: Path, draw: random.Random) -> int:
    if draw.random() < 0.7:
        path, lines = directory / "rows.jsonl", (sound / "rows.jsonl").read_text().splitlines()
        for at in draw.sample(range(len(lines)), draw.randrange(1, 4)):
            lines[at] = forged(lines[at], draw)
        content = "\n".join(lines).encode(errors="surrogatepass")
    else:
        path, columns = directory / "rows.parquet", {name: [row[name] for row in ROWS] for name in ROWS[0]}
        columns[draw.choice([*columns, "input_token_ids", "new"])] = [draw.choice(CELLS)] * len(ROWS)
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        content = path.read_bytes()
    path.write_bytes(damaged(content, draw) if draw.random() < 0.3 else content)
    config = DataConfig(
        apply_chat_template=draw.random() < 0.5,
        allow_special_tokens=draw.random() < 0.5,
        environment_key=draw.choice([None, "game", "answer"]),
        prompt_key=draw.choice([*["prompt"] * 9, "game.size"]),
    )
    tokenizer, supervised = load_tokenizer(sound / "model"), draw.random() < 0.3
    return reads(lambda: PromptSource([path], tokenizer, config, seed=0, need_responses=supervised).next(50))


KINDS = [read_run, read_converted, read_checkpoint, read_model, read_configuration, read_rows]


def read_case(arguments: Sequence[str]) -> int:
    """Run one case in a fork of its own."""
    number, root = int(arguments[0]), Path(arguments[1])
    torch.set_num_threads(1)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    seconds = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    return KINDS[number % len(KINDS)](root / f"case-{number}", root / "sound", random.Random(number))


def outcome(number: int, root: Path) -> str:
    """Run a case; return the kind, the exit code and the first problem's code, or "FAULT" and what is wrong."""
    directory, kind = root / f"case-{number}", KINDS[number % len(KINDS)].__name__
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    out, err = directory / "stdout", directory / "stderr"
    process = ForkedCommand(worker_server(), [str(number), str(root)], out, err, read_case)
    try:
        code = process.wait(HANG_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return f"FAULT {number}, {kind}: did not end within {HANG_S:.0f} s"
    errors = err.read_text(errors="replace")
    codes = re.findall(r"\[([a-z][a-z0-9._-]*)\]$", errors, re.MULTILINE)
    is_said = codes or not code or (code == 1 and out.stat().st_size)  # differing checkpoints are shown, and no fault
    is_executed = any(directory.rglob("executed"))
    if code not in (0, 1, 2) or "Traceback" in errors or "unexpected" in codes or is_executed or not is_said:
        return f"FAULT {number}, {kind}: exit code {code}, {errors[-300:]}"
    shutil.rmtree(directory)
    return " ".join([kind, str(code), *codes[:1]])


@pytest.mark.acceptance
@pytest.mark.timeout(0)
def test_fuzzed_input_is_read_or_rejected(tiny: Tiny, tmp_path: Path) -> None:
    root = Path(os.environ.get("FUZZ_DIR", tmp_path)).absolute()
    numbers, sound = range(*map(int, os.environ.get("FUZZ", "0:300").split(":"))), root / "sound"
    shutil.rmtree(sound, ignore_errors=True)
    for backend in BACKENDS:
        flags = quick(tiny, sound / backend, "--trainer.backend", backend, "--checkpoint.every", "2")
        succeed(flags, root / f"log-{backend}")
    shutil.copytree(tiny.model, sound / "model")
    (sound / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, CHAT]))
    succeed(["convert", "to-megatron", str(tiny.model), str(sound / "converted")], root / "log-converted")
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda number: outcome(number, root), numbers))
    print(*(f"{count} {what}" for what, count in sorted(Counter(found).items())), sep="\n")
    assert not [each for each in found if each.startswith("FAULT")]
