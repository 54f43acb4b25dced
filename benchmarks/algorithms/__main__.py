"""Run every section in one process on one thread, print the tables, and store them."""

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.algorithms import logprobs, packing, partition, reduction, training
from benchmarks.algorithms.goals import Verdict, verdicts
from benchmarks.algorithms.measure import Row

SECTIONS = {
    "packing": packing.rows,
    "reduction": reduction.rows,
    "logprobs": logprobs.rows,
    "partition": partition.rows,
    "training": training.rows,
}
RESULTS = Path(__file__).parent.parent / "results" / "algorithms.json"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithms", description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all, which are then stored")
    chosen = parser.parse_args().sections or list(SECTIONS)
    unknown = sorted(set(chosen) - set(SECTIONS))
    if unknown:
        parser.error(f"unknown section {', '.join(unknown)}; choose from {', '.join(SECTIONS)}")
    torch.set_num_threads(1)
    tables = {}
    for name in chosen:
        tables[name] = SECTIONS[name]()
        print(f"\n{name}\n{_table(tables[name])}", flush=True)
    judged = verdicts(tables)
    print("\ngoals")
    for verdict in judged:
        print(f"  {'met    ' if verdict.met else 'NOT MET'}  {verdict.goal}: {verdict.found:,.3f}")
    if set(chosen) == set(SECTIONS):
        _keep(tables, judged)


def _table(rows: list[Row]) -> str:
    cells = [(row.case, row.form, f"{row.value:,.3f} {row.unit}".rstrip(), row.note) for row in rows]
    widths = [max(len(cell[column]) for cell in cells) for column in range(3)]
    return "\n".join(
        f"  {case:<{widths[0]}}  {form:<{widths[1]}}  {value:>{widths[2]}}  {note}" for case, form, value, note in cells
    )


def _keep(tables: dict[str, list[Row]], judged: list[Verdict]) -> None:
    record = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "goals": [asdict(verdict) for verdict in judged],
        "sections": {name: [asdict(row) for row in rows] for name, rows in tables.items()},
    }
    # A form that did not finish has the value null, because JSON has no infinity.
    text = json.dumps(record, indent=1).replace("Infinity", "null")
    RESULTS.write_text(text + "\n")
    print(f"\nkept in {RESULTS.relative_to(Path.cwd()) if RESULTS.is_relative_to(Path.cwd()) else RESULTS}")


if __name__ == "__main__":
    main()
