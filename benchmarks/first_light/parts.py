"""The parts of a first run: commands, what they need, and how long they may take."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.first_light.machine import Machine

STAGES = (1, 2)
_CLI = (sys.executable, "-m", "slime_like.commands.main")
_TRANSPORTS = "tests/process/test_collective_transport.py"

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    Attributes:
        limit_s: of all its commands together.
        commands: run one after the other, as long as they succeed.
        gpus: CUDA devices it needs.
        packages: distributions it needs.
        tests: file of pytest's results (JUnit's format).
        table: Markdown that the report includes.
    """

    name: str
    stage: int
    limit_s: int
    commands: tuple[Command, ...]
    gpus: int = 1
    packages: tuple[str, ...] = ()
    tests: Path | None = None
    table: Path | None = None

    @property
    def slug(self) -> str:
        """Its name as a file's."""
        return self.name.lower().replace(" ", "-")

    def obstacle(self, machine: Machine) -> str | None:
        """Why it cannot run on ``machine``; ``None`` where it can."""
        if machine.gpus < self.gpus:
            return f"needs {self.gpus} CUDA devices, torch sees {machine.gpus}"
        missing = [name for name in self.packages if name not in machine.packages]
        return f"not installed: {', '.join(missing)}" if missing else None


def parts(machine: Machine, out: Path) -> list[Part]:
    """Every part, in order. The limits of stage 1 leave room below nine minutes for an installation."""
    trainer, apart = out / "trainer.md", "not transformer_engine and not flash-attn"
    conformance = ["tests/engines/test_conformance.py"]
    return [
        # Without a device these two run as well: tests are collected and skipped, the benchmark takes the tiny model.
        _tests("GPU tests", 1, 200, out, ["tests/gpu", "tests/unit/weights"], apart, gpus=0),
        Part("Trainer benchmark", 1, 260, (_benchmark(machine, trainer),), gpus=0, table=trainer),
        _tests("CUDA IPC", 1, 60, out, [_TRANSPORTS], "colocated"),
        _tests("Transformer Engine", 2, 300, out, ["tests/gpu"], "transformer_engine", package="transformer-engine"),
        _tests("flash-attn", 2, 180, out, ["tests/gpu"], "flash-attn", package="flash-attn"),
        _tests("NCCL", 2, 120, out, [_TRANSPORTS], "nccl", gpus=2),
        _tests("vLLM conformance", 2, 900, out, conformance, "vllm", package="vllm", marker="engines"),
        Part("Quickstart", 2, 1200, _quickstart(out / "quickstart"), packages=("ray", "vllm")),
        Part("Layouts", 2, 400, (_layouts(machine),), packages=("ray",)),
    ]


def _tests(
    name: str,
    stage: int,
    limit_s: int,
    out: Path,
    files: Sequence[str],
    chosen: str,
    *,
    gpus: int = 1,
    package: str | None = None,
    marker: str = "gpu",
) -> Part:
    results = out / f"{name.lower().replace(' ', '-')}.xml"
    options = ("-q", "-rs", "-p", "no:cacheprovider", "-m", marker, "-k", chosen, "--junitxml", str(results))
    command = (sys.executable, "-m", "pytest", *options, *files)
    return Part(name, stage, limit_s, (command,), gpus, (package,) if package else (), results)


def _benchmark(machine: Machine, result: Path) -> Command:
    workload = ["--shapes", "tiny"]
    if machine.gpus:
        workload = ["--shapes", "0.6b", "1.7b", "--tokens", "8192", "--recompute", "none"]
    program = (sys.executable, "-m", "benchmarks.trainer")
    return (*program, *workload, "--micro-batches", "4", "--repeats", "3", "--result", str(result))


def _quickstart(directory: Path) -> tuple[Command, ...]:
    """The quickstart in bfloat16; the trainer and the engine take turns on one GPU."""
    model, warm, data = directory / "model", directory / "warm_start", directory / "model/data"
    common = ("--resume", "never", "--model.dtype", "bfloat16", "--logging.progress", "plain")
    start = ("--run_dir", str(warm), "--model.path", str(model), "--data.train", str(data / "sft.jsonl"))
    learn = ("--run_dir", str(directory / "rl"), "--model.path", str(warm / "hf"))
    given = ("--data.train", str(data / "train.jsonl"), "--evaluation.files", str(data / "eval.jsonl"))
    shared = ("--cluster.placement", "colocated", "--rollout.start_timeout_s", "600")
    memory = ("--rollout.engine_args", "{gpu_memory_utilization: 0.4}")
    return (
        (*_CLI, "make-tiny-model", str(model), "--force"),
        (*_CLI, "train", "configs/quickstart_warm_start.yaml", *common, *start),
        (*_CLI, "train", "configs/quickstart.yaml", *common, *learn, *given, *shared, *memory),
    )


def _layouts(machine: Machine) -> Command:
    """Layouts of one rank, on one GPU; with more GPUs those that fit them."""
    named = ("--layouts", "distributed", "ring", "allgather") if machine.gpus < 2 else ()
    return (*_CLI, "verify", "layouts", *named)
