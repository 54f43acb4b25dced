"""The command ``python -m benchmarks.first_light``: what this machine's GPU shows of the project, with one report.

Stage 1 needs torch, transformers and the wheels of scripts/gpu_wheels.sh; it ends within nine minutes. Stage 2 needs
more: Transformer Engine, flash-attn, vLLM, Ray, a second GPU. Parts that cannot run are skipped with the reason. The
exit code is 1 if a part failed or was stopped.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.first_light.machine import Machine
from benchmarks.first_light.parts import STAGES, parts
from benchmarks.first_light.report import render
from benchmarks.first_light.running import last_lines, run_part


def main(arguments: Sequence[str] | None = None) -> int:
    """The report is written after every part."""
    options = _parser().parse_args(arguments)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    machine = Machine.seen()
    command = shlex.join(["bash", "benchmarks/first_light.sh", *(sys.argv[1:] if arguments is None else arguments)])
    results = []
    for part in parts(machine, out):
        if part.stage not in options.stage:
            continue
        print(f"stage {part.stage}, {part.name}: at most {part.limit_s} s", file=sys.stderr, flush=True)
        result = run_part(part, machine, out)
        results.append(result)
        if result.bad:
            print("\n".join(last_lines(out / f"{part.slug}.log")), file=sys.stderr)
        print(f"  {result.outcome} {result.reason}".rstrip(), file=sys.stderr, flush=True)
        report = render(machine, results, command)
        (out / "report.md").write_text(report, encoding="utf-8")
    print(report)
    return int(any(result.bad for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bash benchmarks/first_light.sh", description=__doc__)
    add = parser.add_argument
    add("--stage", type=int, nargs="+", choices=STAGES, default=list(STAGES), help="default: both")
    add("--out", type=Path, default=Path("build/first_light"), help="logs and report.md (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
