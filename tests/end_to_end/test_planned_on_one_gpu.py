"""One GPU: a recipe fits, or the command that is printed does, or the sum that is printed shows why nothing does."""

import json
import re
import shlex
from pathlib import Path

import pytest

from slime_like.commands.plan import without_flags
from slime_like.commands.root import run
from slime_like.planning.hardware import GIB
from tests.support.published import ROOT, at_the_root, with_fewer_layers  # noqa: F401
from tests.unit.planning.test_arithmetic import MODELS, PUBLISHED

Capture = pytest.CaptureFixture[str]
ONE_GPU = ["--cluster.gpus_per_node", "1", "--cluster.nodes", "1"]
# Eight GPUs, of which engines and trainer have four each.
ONE_GPU += ["--cluster.placement", "separate", "--rollout.num_engines", "4", "--rollout.tensor", "1"]
ONE_GPU += ["--trainer.parallel.data", "2"]
# Qwen3-4B with 2 of its 36 layers, all alike: parameters, 18 bytes each, are most of what a trainer holds.
LAYER = 2560 * 128 * (32 + 8 + 8) + 32 * 128 * 2560 + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128
PARAMETERS = 151_936 * 2560 + 2 * LAYER + 2560


@pytest.fixture(scope="session")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = with_fewer_layers(tmp_path_factory.mktemp("shallow"), "Qwen3-4B", 2)
    sizes = ["--trainer.target_tokens_per_batch", "4096", "--rollout.max_new_tokens", "512"]
    return ["--model.path", str(directory), *sizes]


@pytest.mark.parametrize(
    ("memory_gib", "changed"),
    [
        (24, set()),
        (10, {"trainer.optimizer.offload"}),
        (9, {"trainer.backend", "trainer.fsdp.accumulate", "trainer.optimizer.offload"}),
    ],
)
def test_the_printed_command_fits(memory_gib: float, changed: set[str], shallow: list[str], capsys: Capture) -> None:
    """Trainer and engine share the GPU; a smaller one also takes what saves memory, and no more than it needs."""
    size = ["--cluster.gpu_memory_gib", str(memory_gib)]
    assert run(["plan", "configs/qwen3_4b.yaml", *shallow, *ONE_GPU, *size]) == 1
    printed = capsys.readouterr().out
    (command,) = [line for line in printed.splitlines() if line.startswith("  slime-like plan ")]
    (host,) = re.findall(r"This fits, .* free, ([\d.]+ GiB) of host memory per node", printed)
    arguments = shlex.split(command)[1:]
    fields = {word.removeprefix("--") for word in arguments if word.startswith("--")}
    assert {"cluster.placement", "rollout.num_engines", "trainer.parallel.data"} <= fields
    saving = {"recompute", "head_chunk_tokens", "optimizer.offload", "activation_offload", "backend", "fsdp.accumulate"}
    saving = {f"trainer.{name}" for name in saving}
    assert fields & saving == changed
    assert run(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("fits. ") and f"NOT checked: {host} per node needed" in " ".join(printed.split())


def test_what_nothing_fits_is_shown_by_a_sum(shallow: list[str], tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "plan.json"
    flags = [*shallow, *ONE_GPU, "--cluster.gpu_memory_gib", "4", "--output", str(output)]
    assert run(["plan", "configs/qwen3_4b.yaml", *flags]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    found = json.loads(output.read_text())["remedy"]
    assert "No setting fits these GPUs. " in printed and found["changes"] == {} and found["reason"] in printed
    needed, parts = found["reason"].split(", and a GPU has 4.00 GiB: ")
    sizes = [float(size) * {"GiB": 1, "MiB": 1 / 1024}[unit] for size, unit in re.findall(r"([\d.]+) ([GM]iB)", parts)]
    (total,) = re.findall(r"at least ([\d.]+) GiB", needed)
    assert sum(sizes) == pytest.approx(float(total), abs=0.1) and float(total) > 4


def test_nothing_is_looked_for_where_size_is_not_all(shallow: list[str], tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    flags = [*shallow, *ONE_GPU, "--rollout.max_new_tokens", "32000", "--output", str(output)]
    assert run(["plan", "configs/qwen3_4b.yaml", *flags]) == 1
    assert json.loads(output.read_text())["remedy"] is None


def test_changed_flags_replace_those_that_were_given() -> None:
    given = ["--data.train", "a", "b", "--trainer.recompute=none", "--trainer.parallel.data", "4", "--steps", "3"]
    assert without_flags(given, {"trainer.recompute", "trainer.parallel.data"}) == [*given[:3], *given[-2:]]


@pytest.mark.acceptance
@pytest.mark.parametrize("memory_gib", [24, 79.1, 139.8])
@pytest.mark.parametrize(
    ("recipe", "model"),
    [("qwen2.5_0.5b", "Qwen2.5-0.5B"), ("qwen3_4b", "Qwen3-1.7B"), ("qwen3_4b", "Qwen3-4B"), ("qwen3_8b", "Qwen3-8B")],
)
def test_published_models_on_one_gpu(
    recipe: str, model: str, memory_gib: float, tmp_path: Path, capsys: Capture
) -> None:
    """Each has a command that fits; its trainer holds what a parameter takes: 2 bytes, 4 for the gradient and, where
    it is not offloaded, 12 for the optimizer."""
    size = ["--cluster.gpu_memory_gib", str(memory_gib), "--model.path", str(MODELS / model)]
    assert run(["plan", f"configs/{recipe}.yaml", *ONE_GPU, *size]) == 1
    (command,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  slime-like plan ")]
    output = tmp_path / "plan.json"
    assert run([*shlex.split(command)[1:], "--output", str(output)]) == 0
    (kind,) = json.loads(output.read_text())["kinds"]
    held = kind["estimate"]["memory"]
    if "--trainer.backend fsdp" in command:
        assert held["host_optimizer_bytes"] == 16 * PUBLISHED[model]
        return
    offloaded = "--trainer.optimizer.offload true" in command
    assert held["parameter_bytes"] + held["gradient_bytes"] == pytest.approx(6 * PUBLISHED[model], rel=1e-3)
    assert held["optimizer_bytes"] == pytest.approx(0 if offloaded else 12 * PUBLISHED[model], rel=1e-3)
    training = next(phase for phase in kind["phases"] if phase["phase"] == "training")
    assert training["total"] < memory_gib * GIB
