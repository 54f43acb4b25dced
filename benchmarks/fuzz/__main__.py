"""Fuzz checkpoints, run directories, configurations and rows: ``python -m benchmarks.fuzz OUT RESULT --seed 7``.

Each case runs in a fork of a process that has imported everything. A command, or its reader, gets a damaged or forged
copy of valid input. It must end with exit code 0, or with 1 or 2 and messages that have a code; without a traceback,
within 10 s of processor time, and with at most 2 GB of memory. Exit code 1 otherwise.
"""

import argparse
import datetime
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.fuzz.cases import KINDS, Read
from benchmarks.fuzz.sound import Sound, make_sound

DEADLINE_S = 10.0
HANG_S = 60.0
"""Deadline by the clock, longer than for processor time because others may use the machine."""
MEMORY_BYTES = 2 * 10**9
_CODE = re.compile(r"\[([a-z][a-z0-9._-]*)\]$")


@dataclass(frozen=True)
class Verdict:
    """One case: exit code (negative: the signal that ended it), codes of its messages, seconds, and peak memory.

    Attributes:
        fault: the violated requirement; "" if there is none.
    """

    number: int
    kind: str
    code: int
    codes: tuple[str, ...]
    seconds: float
    memory_bytes: int
    fault: str


def kind_of(draw: random.Random) -> str:
    return draw.choices(list(KINDS), [share for share, _ in KINDS.values()])[0]


def run_case(number: int, seed: int, sound: Sound, root: Path) -> Verdict:
    draw = random.Random(f"{seed}-{number}")
    kind, directory = kind_of(draw), root / f"case-{number}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    read = KINDS[kind][1](directory, sound, draw)
    began = time.monotonic()
    process = os.fork()
    if process == 0:
        _read_in_child(read, directory)
    status, used = _wait(process, began + HANG_S)
    seconds = time.monotonic() - began
    code = os.waitstatus_to_exitcode(status)
    files = [directory / name for name in ("stderr", "stdout")]
    errors, shown = (file.read_text(errors="replace").strip() if file.is_file() else "" for file in files)
    cpu = used.ru_utime + used.ru_stime
    memory = used.ru_maxrss * 1024
    codes = tuple(found[1] for line in errors.splitlines() if (found := _CODE.search(line)))
    verdict = Verdict(number, kind, code, codes, seconds, memory, _fault(code, codes, errors, shown, cpu, memory))
    if not verdict.fault:
        shutil.rmtree(directory)
    return verdict


def _fault(code: int, codes: tuple[str, ...], errors: str, shown: str, cpu_s: float, memory: int) -> str:
    """Return the fault. ``shown``: standard output; differing checkpoints or a plan that does not fit are no fault."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}" + (" after the deadline" if code == -signal.SIGKILL else "")
    if code not in (0, 1, 2):
        return f"exit code {code}"
    if "Traceback" in errors or "unexpected" in codes:
        return next((line for line in errors.splitlines() if "[unexpected]" in line), "a traceback")
    if code and not codes and not (code == 1 and shown):
        return "no sentence"
    if cpu_s > DEADLINE_S:
        return f"{cpu_s:.0f} s"
    return f"{memory / 1e9:.1f} GB" if memory > MEMORY_BYTES else ""


def _read_in_child(read: Read, directory: Path) -> None:
    code = 70
    try:
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(directory / name, os.O_WRONLY | os.O_CREAT), descriptor)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (int(DEADLINE_S) * 2, int(DEADLINE_S) * 2))
        try:
            code = read()
        except SystemExit as exit_:  # by argparse
            code = exit_.code if isinstance(exit_.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(process: int, until: float) -> tuple[int, resource.struct_rusage]:
    while True:
        found, status, used = os.wait4(process, os.WNOHANG)
        if found:
            return status, used
        if time.monotonic() > until:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def run_all(options: argparse.Namespace, sound: Sound) -> Iterator[Verdict]:
    numbers = range(options.count) if options.only is None else options.only
    with ThreadPoolExecutor(options.parallel) as pool:
        for verdict in pool.map(lambda number: run_case(number, options.seed, sound, options.out), numbers):
            if verdict.fault:
                print(f"case {verdict.number}, {verdict.kind}: {verdict.fault}", flush=True)
            yield verdict


def render(verdicts: list[Verdict], seed: int) -> str:
    lines = [
        f"{len(verdicts):,} fuzzed inputs, {datetime.date.today()},",
        f"`python -m benchmarks.fuzz OUT RESULT --seed {seed} --count {len(verdicts)}`.",
        f"Required: exit code 0, 1 or 2, a sentence with a code, no traceback, {DEADLINE_S:g} s of "
        f"processor time, {MEMORY_BYTES / 1e9:g} GB (the imports' included).",
        f"Faults: {sum(bool(verdict.fault) for verdict in verdicts)}.",
        "",
        "| input | cases | exit codes | slowest, s | peak memory, GB | codes of problems |",
        "|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        some = [verdict for verdict in verdicts if verdict.kind == kind]
        if not some:
            continue
        exits = ", ".join(f"{code}: {count}" for code, count in sorted(Counter(v.code for v in some).items()))
        codes = Counter(code for verdict in some for code in set(verdict.codes)).most_common()
        shown = ", ".join(f"{code} {count}" for code, count in codes)
        slowest, memory = max(v.seconds for v in some), max(v.memory_bytes for v in some) / 1e9
        lines.append(f"| {kind} | {len(some)} | {exits} | {slowest:.1f} | {memory:.2f} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("out", type=Path, help="directory to work in; cases with a fault stay there")
    parser.add_argument("result", type=Path, help="Markdown file to write")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--only", type=int, nargs="+", help="run these cases alone")
    parser.add_argument("--parallel", type=int, default=2, help="processes at a time (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    sound = make_sound(options.out / "sound")
    verdicts = list(run_all(options, sound))
    text = render(verdicts, options.seed)
    options.result.write_text(text, encoding="utf-8")
    print(text)
    return 1 if any(verdict.fault for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
