"""Measure the time of ``slime-like plan`` for 64 and 1,024 ranks: ``python -m benchmarks.planning RESULT``.

The command itself runs in a separate process on two cores. Exit code 1 if a bound does not hold.
"""

import datetime
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

CORES = 2


@dataclass(frozen=True)
class Case:
    """A recipe, the flags that set its size, and the bound on its time in seconds."""

    recipe: str
    ranks: int
    bound_s: float
    layout: dict[str, int]

    @property
    def arguments(self) -> list[str]:
        sizes = [word for axis, size in self.layout.items() for word in (f"--trainer.parallel.{axis}", str(size))]
        return ["plan", f"configs/{self.recipe}.yaml", "--cluster.nodes", str(self.ranks // 8), *sizes]


CASES = (
    Case("qwen3_32b", 64, 60, {"tensor": 8, "pipeline": 4, "context": 2}),
    Case("qwen3_32b", 1024, 180, {"tensor": 8, "pipeline": 8, "context": 2, "data": 8}),
    Case("qwen3_30b_a3b", 64, 60, {"tensor": 4, "pipeline": 4, "data": 4, "expert": 8}),
)


@dataclass(frozen=True)
class Row:
    """One run: exit code, first line, wall and processor seconds, and peak resident memory in GiB."""

    case: Case
    code: int
    verdict: str
    wall_s: float
    cpu_s: float
    memory_gib: float

    @property
    def held(self) -> bool:
        return self.wall_s < self.case.bound_s and self.verdict.startswith(
            ("fits. ", "does not fit: ", "cannot start: ")
        )


def measure(case: Case) -> Row:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [str(Path(sys.executable).with_name("slime-like")), *case.arguments],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES]),
    )
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(done.stdout + done.stderr)
    verdict = (done.stdout.strip().splitlines() or [""])[0]
    return Row(case, done.returncode, verdict, wall, cpu, after.ru_maxrss / 2**20)


def render(rows: list[Row]) -> str:
    lines = [
        f"`slime-like plan` of many ranks on {CORES} cores, {datetime.date.today()}, `python -m benchmarks.planning`.",
        "Bounds: 60 s for 64 ranks, 180 s for 1,024. Imports are included; memory is the largest so far.",
        "",
        "| command | ranks | wall, s | processor, s | memory, GiB | bound, s | held |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| `slime-like {' '.join(row.case.arguments)}` | {row.case.ranks} | {row.wall_s:.1f} | {row.cpu_s:.1f} | "
            f"{row.memory_gib:.1f} | {row.case.bound_s:g} | {'yes' if row.held else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    result = Path(sys.argv[1])
    result.parent.mkdir(parents=True, exist_ok=True)
    rows = [measure(case) for case in CASES]
    result.write_text(render(rows), encoding="utf-8")
    print(render(rows))
    return 0 if all(row.held for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
