"""Training continues from a checkpoint exactly under the same layout, and up to rounding under another one.

The continued run is compared with one that was never interrupted: the weights in Hugging Face form at the checkpoint
and after another AdamW step (which depends on moments and step counts), and random numbers drawn after each of both.
"""

import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from backends.fsdp.optimizer import learning_rate
from backends.megatron.trainer import MegatronTrainer
from slime_like.algorithms.packing.pack import pack_sequences, zero_weight_pack
from slime_like.config import RunConfig
from slime_like.errors import CheckpointError, TrainerError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import PendingSave, RankPlacement
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import PackedTrajectory
from tests.parallel.layouts import layout_of
from tests.parallel.ranks import run_by_size, run_ranks, selected
from tests.parallel.steps import (
    Trainer,
    assert_close,
    exported_from,
    held_writes,
    running,
    same_bits,
    small_disk,
    take_step,
)
from tests.parallel.tiny import scored_sequences, tiny_config
from tests.support.acceptance import some_in_acceptance
from tests.support.forged import forged_copies

pytestmark = pytest.mark.timeout(900)  # one fork runs many cases

DENOMINATOR = 4.0

LAYOUTS = (
    *("single", "single-distributed", "tp2", "tp2-sp-dp2-distributed", "pp2-vpp2-distributed", "pp3-distributed"),
    *("cp2-distributed", "dp2-ep2-distributed", "dp2-ep2"),
)


@dataclass
class RankRecord:
    """One rank's weights at the checkpoint and after another step, and numbers drawn right after the checkpoint."""

    at_checkpoint: dict[str, Tensor]
    later: dict[str, Tensor]
    drawn: Tensor


def _save_and_continue(placement: RankPlacement, config: RunConfig, directory: Path) -> RankRecord:
    with running(placement, config) as trainer:
        two_seeded_steps(trainer, placement)
        trainer.save(directory)
        return record_of(trainer)


def two_seeded_steps(trainer: Trainer, placement: RankPlacement) -> None:
    torch.manual_seed(100 + placement.rank)
    for _ in range(2):
        step_of_four(trainer)


def _save_in_background_and_continue(placement: RankPlacement, config: RunConfig, directory: Path) -> RankRecord:
    """Write nothing before another step has changed every weight and moment."""
    with held_writes() as gate, running(placement, config) as trainer:
        two_seeded_steps(trainer, placement)
        save = trainer.start_save(directory)
        record = record_of(trainer)
        assert not save.is_written()
        with pytest.raises(TrainerError) as caught:  # its copies would be overwritten
            trainer.start_save(following := directory.with_name("next"))
        assert caught.value.code == "save-under-way" and not following.exists()
        assert not list(directory.glob("*.distcp")) and not (directory / "checksums.json").exists()
        dist.barrier()
        gate.set()
        save.finish()
        return record


def load_and_continue(placement: RankPlacement, config: RunConfig, directory: Path) -> RankRecord:
    """Load into a trainer that has already trained, whose state must not survive."""
    with running(placement, config) as trainer:
        step_of_four(trainer)
        trainer.load(directory)
        return record_of(trainer)


def record_of(trainer: Trainer) -> RankRecord:
    drawn, at_checkpoint = torch.rand(4), exported_from(trainer)
    step_of_four(trainer)
    return RankRecord(at_checkpoint, exported_from(trainer), drawn)


def step_of_four(trainer: Trainer) -> None:
    """Train on four sequences in two packs, divided between the replicas."""
    sequences = scored_sequences([(5, 9), (3, 4), (8, 21), (7, 3)])
    packs = [pack_sequences(sequences[:2]), pack_sequences(sequences[2:])]
    take_step(trainer, _own_packs(packs, trainer, trainer.coordinates.data_size), DENOMINATOR)


def _own_packs(packs: list[PackedTrajectory], trainer: Trainer, data_size: int) -> list[PackedTrajectory]:
    mine = packs[trainer.coordinates.data :: data_size]
    return mine or [zero_weight_pack(packs[0])]


def _config(checkpoint: Path, run_dir: Path, layout: dict[str, Any], dtype: str = "float32", **more: Any) -> RunConfig:
    settings = dict(layout)
    optimizer = {"lr": 1e-3, "warmup_steps": 3, "decay": "cosine", "weight_decay": 0.1}
    optimizer["distributed"] = settings.pop("distributed", False)
    rate = 0.01 if ModelDimensions.from_checkpoint(checkpoint).moe_sigmoid else 0.0
    trainer = {"optimizer": optimizer, "router_bias_rate": rate}
    return tiny_config(checkpoint, run_dir, settings, dtype, trainer=trainer, steps=20, **more)


def merged_records(records: list[RankRecord], what: str) -> dict[str, Tensor]:
    return {name: tensor for record in records for name, tensor in getattr(record, what).items()}


def _model(directory: Path, layout: str) -> Path:
    # Tied, so that the second copy of the embedding is covered; with experts if the layout has them, and moving biases.
    families = {"dp2-ep2": ("qwen3_moe", False), "dp2-ep2-distributed": ("deepseek_v3", False)}
    families["tp2-sp-dp2-distributed"] = ("qwen3_5_text", True)  # layers of two kinds
    family, tied = families.get(layout, ("qwen2", True))
    layers = 4 if "pp" in layout or layout == "single-distributed" else 2  # pipelines continue from the latter
    make_tiny_model(directory, family, num_hidden_layers=layers, tie_word_embeddings=tied)
    return directory


@dataclass
class Saved:
    """A run that was saved and then continued."""

    config: RunConfig
    checkpoint: Path
    records: list[RankRecord]


BEHIND = [("single", "float32"), ("single-distributed", "bfloat16"), ("tp2-sp-dp2-distributed", "bfloat16")]
"""Saves that are written in the background."""
SAVED = [("tp2", "bfloat16"), *((layout, "float32") for layout in LAYOUTS if layout != "single")]
SAME = [
    *BEHIND,
    ("tp2", "bfloat16"),
    *((layout, "float32") for layout in LAYOUTS if layout not in ("single", "tp2", "cp2-distributed")),
]
OTHERS = [
    ("tp2-sp-dp2-distributed", "single-distributed"),
    ("single-distributed", "pp2-vpp2-distributed"),
    ("pp2-vpp2-distributed", "tp2-sp-dp2-distributed"),
    ("cp2-distributed", "single-distributed"),
    ("single-distributed", "pp3-distributed"),
    ("tp2", "single"),
    ("dp2-ep2-distributed", "single-distributed"),
]
"""Layouts that write and read."""
DAMAGED = [("single", "float32"), ("tp2-sp-dp2-distributed", "float32")]
"""Runs of which tests damage copies."""
IN_ACCEPTANCE = [
    *(("tp2", "bfloat16"), ("pp3-distributed", "float32"), ("dp2-ep2", "float32")),
    *(("cp2-distributed", "single-distributed"), ("single-distributed", "pp3-distributed")),
]


@pytest.fixture(scope="module")
def continued(request: pytest.FixtureRequest) -> list[tuple[str, str, str]]:
    """Return a run's layout and dtype, and the layout that continues it, for every case that this run includes."""
    same = selected(request, "test_same_layout_continues_bit_for_bit")
    others = selected(request, "test_another_layout_continues_up_to_rounding")
    return [(layout, dtype, layout) for layout, dtype in same] + [(wrote, "float32", reads) for wrote, reads in others]


@pytest.fixture(scope="module")
def saved(
    continued: list[tuple[str, str, str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Saved]:
    """Return runs by layout and dtype, for all tests that continue them; none of them may change a run's files."""
    used = {*DAMAGED, *((layout, dtype) for layout, dtype, _ in continued)}
    found = {}
    for function, runs in ((_save_in_background_and_continue, BEHIND), (_save_and_continue, SAVED)):
        tasks = {}
        for layout, dtype in filter(used.__contains__, runs):
            root = tmp_path_factory.mktemp(f"{layout}-{dtype}")
            config = _config(_model(root / "model", layout), root, layout_of(layout), dtype)
            tasks[layout, dtype] = config, root / "checkpoint"
        results = run_by_size(function, tmp_path_factory.mktemp("saves"), tasks)
        found |= {name: Saved(*tasks[name], records) for name, records in results.items()}
    return found


@pytest.fixture(scope="module")
def loaded(
    continued: list[tuple[str, str, str]],
    saved: dict[tuple[str, str], Saved],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[Any, Any]:
    """Return the records of ranks that continue a run, by its layout and dtype and their own layout."""
    root, tasks = tmp_path_factory.mktemp("loads"), {}
    for wrote, dtype, reads in continued:
        run = saved[wrote, dtype]
        tasks[wrote, dtype, reads] = _config(run.config.model.path, root, layout_of(reads), dtype), run.checkpoint
    return run_by_size(load_and_continue, root, tasks)


@pytest.mark.parametrize(("layout", "dtype"), some_in_acceptance(SAME, IN_ACCEPTANCE.__contains__))
def test_same_layout_continues_bit_for_bit(layout: str, dtype: str, saved: Any, loaded: Any) -> None:
    """Compare weights, moments and random numbers, also of saves that are written after a further step."""
    before, after = saved[layout, dtype].records, loaded[layout, dtype, layout]
    for what in ("at_checkpoint", "later"):
        same_bits(merged_records(after, what), merged_records(before, what))
    at, later = (merged_records(before, what)["model.embed_tokens.weight"] for what in ("at_checkpoint", "later"))
    assert not torch.equal(at, later)
    for wrote, read in zip(before, after, strict=True):
        assert torch.equal(wrote.drawn, read.drawn)


@pytest.mark.parametrize(("wrote", "reads"), some_in_acceptance(OTHERS, IN_ACCEPTANCE.__contains__))
def test_another_layout_continues_up_to_rounding(wrote: str, reads: str, saved: Any, loaded: Any) -> None:
    before, after = saved[wrote, "float32"].records, loaded[wrote, "float32", reads]
    same_bits(merged_records(after, "at_checkpoint"), merged_records(before, "at_checkpoint"))
    # Ranks are summed in another order, and AdamW divides by small second moments.
    assert_close(merged_records(after, "later"), merged_records(before, "later"), 2e-5)


def _memory_of_a_save(placement: RankPlacement, config: RunConfig, directory: Path) -> float:
    """Return the kernel's peak of a save's additional memory, as a fraction of the optimizer state."""
    with running(placement, config) as trainer:
        step_of_four(trainer)
        trainer.save(directory / "first")  # imports what it needs
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _kernel_bytes("VmRSS")
        trainer.save(directory / "second")
        parameters = sum(parameter.numel() for chunk in trainer.wrapped for parameter in chunk.parameters())
        return (_kernel_bytes("VmHWM") - before) / (3 * 4 * parameters)


def _kernel_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def test_a_save_needs_little_additional_memory(tmp_path: Path) -> None:
    large = {"hidden_size": 384, "intermediate_size": 768, "vocab_size": 8192, "tie_word_embeddings": True}
    make_tiny_model(tmp_path / "model", "qwen2", num_hidden_layers=2, **large)
    config = _config(tmp_path / "model", tmp_path, layout_of("single-distributed"))
    (added,) = run_ranks(_memory_of_a_save, 1, tmp_path / "ranks", config, tmp_path / "checkpoint")
    assert added < 0.25


def _errors(placement: RankPlacement, config: RunConfig, directories: list[Path]) -> list[str]:
    with running(placement, config) as trainer:
        return [error_of(trainer.load, directory) for directory in directories]


def _rate_after_load(placement: RankPlacement, config: RunConfig, directory: Path) -> tuple[int, float]:
    """Return the number of updates and the learning rate of the last one."""
    with running(placement, config) as trainer:
        trainer.load(directory)
        return trainer.optimizer.scheduler.num_steps, trainer.optimizer.learning_rate


def error_of(action: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        action(*arguments)
    return str(caught.value)


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _flip(place: float) -> Callable[[bytes], bytes]:
    """Flip one bit of the byte at this fraction of the file."""

    def flipped(content: bytes) -> bytes:
        index = int(place * len(content))
        return content[:index] + bytes([content[index] ^ 0x10]) + content[index + 1 :]

    return flipped


EVERY_FILE = ("*.distcp", ".metadata", "common.pt", "metadata.json", "checksums.json")
Damage = Callable[[bytes], bytes | None]
DAMAGE: list[tuple[str, Damage]] = [
    (file, damage)
    for damage, files in {
        _cut: ("*.distcp", ".metadata", "common.pt", "checksums.json"),
        _flip(0.01): EVERY_FILE,
        _flip(0.5): EVERY_FILE,
        _flip(0.99): EVERY_FILE,
        (lambda content: b""): ("*.distcp", ".metadata", "checksums.json"),
        (lambda content: content[:-1]): ("*.distcp", "common.pt"),
        (lambda content: content + b"x"): ("*.distcp", "common.pt"),
        (lambda content: b"\x93abc" * 50): ("common.pt",),
        (lambda content: b"{"): ("metadata.json",),
        (lambda content: None): ("*.distcp", ".metadata", "common.pt", "checksums.json"),
    }.items()
    for file in files
]
"""A checkpoint's file and a function that damages its content; returning None removes the file."""


def _damaged_copy(whole: Path, directory: Path, pattern: str, damage: Damage) -> str:
    """Copy and damage the checkpoint; return the damaged file's name."""
    shutil.copytree(whole, directory)
    file = max(directory.glob(pattern), key=lambda path: path.stat().st_size)
    content = damage(file.read_bytes())
    if content is None:
        file.unlink()
    else:
        assert content != file.read_bytes()
        file.write_bytes(content)
    return file.name


def test_loading_is_rejected(saved: dict[tuple[str, str], Saved], tmp_path: Path) -> None:
    """Missing checkpoint, every kind of damaged file, another model, another schedule."""
    whole, config = saved["single", "float32"].checkpoint, saved["single", "float32"].config
    directories = [tmp_path / f"step-{number}" / "trainer" for number in range(len(DAMAGE))]
    names = [
        _damaged_copy(whole, directory, pattern, damage)
        for directory, (pattern, damage) in zip(directories, DAMAGE, strict=True)
    ]
    missing, *damaged = run_ranks(_errors, 1, tmp_path / "errors", config, [tmp_path / "none", *directories])[0]
    assert "not a whole training checkpoint" in missing
    for directory, name, message in zip(directories, names, damaged, strict=True):
        absent = f"{directory}: not a whole training checkpoint ({name} is missing); use another one"
        assert message == absent or message.startswith(f"{directory}: is damaged (")
        assert message == absent or message.endswith(f"); resume from a checkpoint before {directory.parent.name}")
        assert name in message
        written = (whole / name).stat().st_size
        length = (directory / name).stat().st_size if (directory / name).exists() else written
        if length != written and name != "checksums.json":
            assert (f"{length} of the {written} bytes" if length < written else f"{length} bytes, though") in message
        assert len(message) < 400 and "\n" not in message

    for family, problem in (("qwen2", "decoder.layers.self_attention.linear_qkv"), ("qwen3", "q_layernorm")):
        make_tiny_model(tmp_path / family, family, num_hidden_layers=3 if family == "qwen2" else 2)
        other = _config(tmp_path / family, tmp_path, {})
        ((message,),) = run_ranks(_errors, 1, tmp_path / f"other-{family}", other, [whole])
        assert problem in message

    executed = tmp_path / "executed"
    stored = ("random/shard_0_1", "embedding.word_embeddings.weight")
    forged = forged_copies(whole, tmp_path, (".metadata", "common.pt"), stored, executed)
    for directory, message in zip(forged, run_ranks(_errors, 1, tmp_path / "forged", config, forged)[0], strict=True):
        assert message.startswith(f"{directory}: ") and "\n" not in message
    assert not executed.exists()

    longer = config.model_copy(update={"steps": 30})
    ((message,),) = run_ranks(_errors, 1, tmp_path / "longer", longer, [whole])
    assert "another learning-rate schedule: lr_decay_steps 20 (now 30)" in message
    halved = longer.model_dump()
    halved["checkpoint"]["override"] = ["schedule"]
    halved["trainer"]["optimizer"]["lr"] /= 2
    overridden = RunConfig.model_validate(halved)
    ((updates, rate),) = run_ranks(_rate_after_load, 1, tmp_path / "overridden", overridden, whole)
    assert updates == 2
    settings = config.trainer.optimizer
    assert rate == pytest.approx(learning_rate(settings, config.total_updates, updates) / 2, rel=1e-9)  # of the warm-up


def test_one_flipped_byte_is_named_on_every_rank_of_any_layout(
    saved: dict[tuple[str, str], Saved], tmp_path: Path
) -> None:
    """Damages a byte of a weight, of a moment and of the last rank's file: all ranks reject each."""
    run = saved["tp2-sp-dp2-distributed", "float32"]
    model, whole = run.config.model.path, run.checkpoint
    stored = json.loads((whole / "checksums.json").read_text())["content"]["pieces"]
    victims = [
        ("__0_0.distcp", "decoder.layers.1.mlp.linear_fc1.weight from [0, 0] on"),
        ("__0_0.distcp", "optimizer.state.exp_avg_sq.decoder.final_layernorm.weight from [0] on"),
    ]
    directories = []
    for number, (file, tensor) in enumerate(victims):
        ((offset, length),) = [(entry[1], entry[2]) for entry in stored[file] if entry[0] == tensor]
        directory = tmp_path / f"damaged-{number}"
        shutil.copytree(whole, directory)
        content = bytearray((directory / file).read_bytes())
        content[offset + length // 2] ^= 1
        (directory / file).write_bytes(content)
        directories.append(directory)
    layouts = ("tp2-sp-dp2-distributed", "single-distributed")
    tasks = {reads: (_config(model, tmp_path, layout_of(reads)), directories) for reads in layouts}
    for messages in (each for ranks in run_by_size(_errors, tmp_path / "ranks", tasks).values() for each in ranks):
        for directory, (file, tensor), message in zip(directories, victims, messages, strict=True):
            assert message.startswith(f"{directory}: is damaged ({file}: bytes ")
            assert f", {tensor}, are not as written" in message


def _save_on_a_full_disk(placement: RankPlacement, config: RunConfig, directory: Path, behind: bool) -> str:
    """Simulate the full disk on the second rank only."""
    with running(placement, config) as trainer, small_disk(50_000 if placement.rank == 1 else None):
        if not behind:
            return error_of(trainer.save, directory)
        save = trainer.start_save(directory)
        if placement.rank == 1:
            assert "__1_0.distcp: could not be written" in error_of(_wait_for, save)
        else:
            _wait_for(save)  # this rank's part is fine
        return error_of(save.finish)


def _wait_for(save: PendingSave) -> None:
    deadline = time.monotonic() + 60
    while not save.is_written():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("behind", [False, True])
def test_a_full_disk_is_reported_on_every_rank(behind: bool, tmp_path: Path) -> None:
    """No rank waits for the one that could not write, and the written files do not load."""
    config = _config(_model(tmp_path / "model", "tp2"), tmp_path, layout_of("tp2"))
    checkpoint = tmp_path / "checkpoint"
    first, second = run_ranks(_save_on_a_full_disk, 2, tmp_path / "ranks", config, checkpoint, behind)
    assert "failed on trainer rank 1" in first
    assert "__1_0.distcp: could not be written" in second
    ((message,), _) = run_ranks(_errors, 2, tmp_path / "errors", config, [checkpoint])
    assert "not a whole training checkpoint" in message


def _save_without_room_for_plain_values(placement: RankPlacement, config: RunConfig, directory: Path) -> str:
    directory.mkdir()
    (directory / "common.pt").symlink_to("/dev/full")
    with running(placement, config) as trainer:
        return error_of(trainer.save, directory)


def test_a_full_disk_is_reported_for_the_file_that_torch_writes(tmp_path: Path) -> None:
    """Torch itself writes Megatron's small file of plain values."""
    config, checkpoint = _config(_model(tmp_path / "model", "single"), tmp_path, layout_of("single")), tmp_path / "full"
    (message,) = run_ranks(_save_without_room_for_plain_values, 1, tmp_path / "ranks", config, checkpoint)
    assert message.startswith(f"{checkpoint}: could not be written (No space left on device; ")


def _save_weights_and_refer(placement: RankPlacement, config: RunConfig, directory: Path) -> dict[str, Tensor]:
    """Make the current policy the reference; it must stay the same while the policy trains on."""
    with running(placement, config) as trainer:
        two_seeded_steps(trainer, placement)
        exported, policy = exported_from(trainer), _scored(trainer, "policy")
        assert not torch.equal(_scored(trainer, "reference"), policy)
        trainer.save_weights(directory)
        trainer.load_weights(directory, "reference")
        assert torch.equal(_scored(trainer, "reference"), policy) and torch.equal(_scored(trainer, "policy"), policy)
        step_of_four(trainer)
        assert torch.equal(_scored(trainer, "reference"), policy)
        assert not torch.equal(_scored(trainer, "policy"), policy)
        return exported


def _score_with(placement: RankPlacement, config: RunConfig, directory: Path) -> dict[str, Tensor]:
    with running(placement, config, scores=True) as trainer:
        trainer.load_weights(directory, "policy")
        return exported_from(trainer)


def _scored(trainer: MegatronTrainer, weights: Any) -> Tensor:
    packs = _own_packs([pack_sequences(scored_sequences([(5, 9), (3, 4)]))], trainer, 1)
    scored = trainer.score(packs, weights)
    return torch.zeros(1) if scored is None else next(iter(scored[0].values()))


def test_saved_weights_become_the_reference_under_the_same_and_another_layout(tmp_path: Path) -> None:
    """The optimizer is sharded and gathers overlap, so that saving has to wait for them; then one rank loads them."""
    model, reference = _model(tmp_path / "model", "tp2"), {"algorithm": {"kl": {"coef": 0.1}}}
    layout = {"tensor": 2, "sequence": True, "distributed": True}
    config = _config(model, tmp_path, layout, "bfloat16", **reference)
    wrote = run_ranks(_save_weights_and_refer, 2, tmp_path / "first", config, tmp_path / "weights")
    alone = _config(model, tmp_path, {}, "bfloat16")
    (read,) = run_ranks(_score_with, 1, tmp_path / "second", alone, tmp_path / "weights")
    same_bits(read, {name: tensor for tensors in wrote for name, tensor in tensors.items()})
