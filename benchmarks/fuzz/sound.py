"""Valid input, of which every case makes a damaged copy."""

import json
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
from safetensors.torch import load_file
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemWriter

from backends.common.checkpoint.integrity import Checksums
from backends.fsdp.checkpoint import MODEL, PLAIN_FILES
from slime_like.commands.main import main
from slime_like.data.ledger import FILE_NAME, GENERATED, ISSUED, SCORED, TRAINED, Ledger
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.orchestration.trainer.checkpoint import Checkpoint, write_state
from tests.support.forged import pieces_of
from tests.unit.observability.report_run import write_run

STEP = "step-000002"
ROWS = [
    {"prompt": f"{i}+{i}=", "answer": str(2 * i), "response": str(2 * i), "game": {"size": i, "moves": ["a", "b"]}}
    for i in range(20)
] + [
    {
        "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}],
        "answer": 2,
        "response": "2",
    }
]


@dataclass(frozen=True)
class Sound:
    """Paths below one directory.

    Attributes:
        run: a run with metrics, tables and a ledger.
        converted: output of ``convert to-megatron``.
        resumable: by backend, a run directory with one checkpoint.
    """

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def rows(self) -> Path:
        return self.root / "rows.jsonl"

    @property
    def parquet(self) -> Path:
        return self.root / "rows.parquet"

    @property
    def converted(self) -> Path:
        return self.root / "converted"

    def resumable(self, backend: str) -> Path:
        return self.root / f"resumable-{backend}"


def make_sound(root: Path) -> Sound:
    """Make everything in this process, so that cases need not import what it takes."""
    sound = Sound(root)
    make_tiny_model(sound.model, "qwen3", num_hidden_layers=1)
    write_run(sound.run)
    ledger = Ledger.begin(sound.run)
    for step in range(20):
        ledger.add([step], ISSUED, version=step)
        ledger.add([step], GENERATED, version=step)
        ledger.add([step], SCORED)
        ledger.add([step], TRAINED, step=step)
    ledger.close()
    sound.rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[:20]), sound.parquet)
    if main(["convert", "to-megatron", str(sound.model), str(sound.converted), "--workers", "1"]) != 0:
        raise RuntimeError("the tiny model could not be converted")
    _make_resumable(sound, "megatron")
    _make_resumable(sound, "fsdp")
    return sound


def _make_resumable(sound: Sound, backend: str) -> None:
    run_dir = sound.resumable(backend)
    step = run_dir / "checkpoints" / STEP
    step.mkdir(parents=True)
    if backend == "megatron":
        shutil.copytree(sound.converted / "trainer", step / "trainer")
    else:
        _write_fsdp(sound.model, step / "trainer")
    ledger = Ledger.begin(run_dir)
    ledger.add(range(4), ISSUED, version=1)
    ledger.snapshot(step / FILE_NAME)
    ledger.close()
    position = {"issued": 4, "seed": 0, "num_rows": 20, "files": ["0"], "mixture": []}
    checksums = {FILE_NAME: zlib.crc32((step / FILE_NAME).read_bytes())}
    lengths = {str(f.relative_to(step)): f.stat().st_size for f in step.rglob("*") if f.is_file()}
    write_state(step, 2, {"data": position, "files": checksums, "lengths": lengths})
    (run_dir / "checkpoints" / "latest").symlink_to(STEP)
    config = {
        "run_dir": str(run_dir),
        "model": {"path": str(sound.model)},
        "trainer": {"backend": backend},
        "steps": 9,
        "data": {"train": [str(sound.rows)], "max_prompt_tokens": 48},
        "rollout": {"max_new_tokens": 8, "engine": "transformers"},
    }
    (run_dir / "config.yaml").write_text(json.dumps(config))
    Checkpoint.read(step).require_whole()


def _write_fsdp(model: Path, directory: Path) -> None:
    """Write the backend's format without ranks."""
    state = {MODEL + name: value for name, value in load_file(model / "model.safetensors").items()}
    checkpoint.save(dict(state), storage_writer=FileSystemWriter(directory), no_dist=True)
    common = {"backend": "fsdp", "format": 1, "layout": {"context": 1, "data": 1}}
    (directory / "common.json").write_text(json.dumps(common))
    Checksums.of_directory(directory, pieces_of(directory), PLAIN_FILES).write()
