"""The command ``python -m benchmarks.conversion``."""

import argparse
import datetime
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.conversion.copying import copy_seconds, forget, remember
from benchmarks.conversion.model import make_checkpoint
from benchmarks.step.machine import describe_machine, load_average

_TIMEOUT_S = 1200


@dataclass(frozen=True, slots=True)
class Row:
    """One conversion: median seconds and maximum memory."""

    what: str
    cache: str
    copy_s: float
    convert_s: float
    own_bytes: int
    rss_bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    load = load_average()
    shutil.rmtree(options.out, ignore_errors=True)
    model = options.out / "hf"
    model.mkdir(parents=True)
    nbytes = make_checkpoint(model, int(options.gigabytes * 1e9))
    rows = []
    for what, source, output in (
        ("to-megatron", model, options.out / "megatron"),
        ("to-hf", None, options.out / "back"),
    ):
        for cache in ("cold", "warm"):
            rows.append(_measure(what, source or options.out / "megatron", output, cache, options))
    report = f"{_report(rows, nbytes, options, load, arguments)}\n\n{_loading(model, options)}"
    print(report)
    if options.result:
        options.result.write_text(f"{report}\n", encoding="utf-8")
    shutil.rmtree(options.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conversion", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the model (default: %(default)s)")
    parser.add_argument("--tensor", type=int, default=2, help="tensor-parallel size (default: %(default)s)")
    parser.add_argument("--pipeline", type=int, default=2, help="pipeline-parallel size (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="threads of a conversion (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/conversion"), help="replaced, and removed at the end")
    parser.add_argument("--result", type=Path, help="also write the report to this file")
    return parser


def _measure(what: str, source: Path, output: Path, cache: str, options: argparse.Namespace) -> Row:
    """Measure copy and conversion in turns, so that the disk behaves alike for both."""
    files = sorted([*source.glob("*.safetensors"), *source.glob("trainer/*.distcp")])
    copies, conversions = [], []
    for _ in range(options.rounds):
        for run in ("copy", "convert"):
            forget(files) if cache == "cold" else remember(files)
            if run == "copy":
                copies.append(copy_seconds(files, options.out / "copy"))
                (options.out / "copy").unlink()
            else:
                shutil.rmtree(output, ignore_errors=True)
                conversions.append(_convert(what, source, output, options))
    return Row(
        what,
        cache,
        median(copies),
        median(conversion["seconds"] for conversion in conversions),
        int(max(conversion["own"] for conversion in conversions)),
        int(max(conversion["rss"] for conversion in conversions)),
    )


def _convert(what: str, source: Path, output: Path, options: argparse.Namespace) -> dict[str, float]:
    numbers = [str(number) for number in (options.tensor, options.pipeline, options.workers)]
    command = [sys.executable, "-m", "benchmarks.conversion.child", what, str(source), str(output), *numbers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)}\n{done.stderr}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _loading(model: Path, options: argparse.Namespace) -> str:
    """Load the directory as training does, with all ranks of the layout, one process each."""
    forget(sorted(model.glob("*.safetensors")))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    numbers = [str(number) for number in (options.tensor, options.pipeline)]
    commands = [
        [sys.executable, "-m", "benchmarks.conversion.rank", str(rank), str(port), str(model), *numbers]
        for rank in range(options.tensor * options.pipeline)
    ]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for command in commands]
    try:
        outputs = [rank.communicate(timeout=_TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        sys.exit(f"error: a rank failed: {' '.join(commands[0])}")
    measured = [json.loads(output.splitlines()[-1]) for output in outputs]
    lines = [
        "Training's own start from the same directory, cold, all ranks of the layout at once on this machine. Own "
        "memory: the most that building the model and loading it add to the rank.",
        "",
        "| rank | seconds | its shard | largest parameter | own memory |",
        "|---|---|---|---|---|",
    ]
    for number, result in enumerate(measured):
        shard, largest, memory = (f"{result[what] / 1e6:.0f} MB" for what in ("shard", "largest", "own"))
        lines.append(f"| {number} | {result['seconds']:.1f} | {shard} | {largest} | {memory} |")
    return "\n".join(lines)


def _report(
    rows: Sequence[Row], nbytes: int, options: argparse.Namespace, load: float, arguments: Sequence[str] | None
) -> str:
    command = " ".join(["python -m benchmarks.conversion", *(sys.argv[1:] if arguments is None else arguments)])
    lines = [
        f"{datetime.date.today()}, {describe_machine()}, load average {load:.1f} at the start, `{command}`.",
        f"A Qwen3 of {nbytes / 1e9:.2f} GB in bfloat16; tensor {options.tensor} x pipeline {options.pipeline}, "
        f"{options.workers} threads; medians of {options.rounds}, copies and conversions in turns. Copy: one thread "
        "reads and writes the same bytes, synced at the end. Cold: nothing of the source in the page cache. Own "
        "memory: what the conversion adds to the process, pages of mapped files not counted; peak RSS counts them and "
        "all imports.",
        "",
        "| | cache | copy | conversion | ratio | own memory | peak RSS |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.what} | {row.cache} | {row.copy_s:.1f} s | {row.convert_s:.1f} s | "
            f"{row.convert_s / row.copy_s:.2f} | {row.own_bytes / 1e6:.0f} MB | {row.rss_bytes / 1e6:.0f} MB |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
