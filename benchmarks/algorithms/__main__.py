"""Run every section in one process on one thread, and print a table."""

import torch

from benchmarks.algorithms import logprobs, packing, partition, reduction, training
from benchmarks.report import heading, met, parser, publish, table

SECTIONS = {
    "packing": packing.rows,
    "reduction": reduction.rows,
    "logprobs": logprobs.rows,
    "partition": partition.rows,
    "training": training.rows,
}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "sections", nargs="*", metavar="SECTION", choices=[*SECTIONS, []], default=[], help=", ".join(SECTIONS)
    )
    options = arguments.parse_args()
    torch.set_num_threads(1)
    head, cells = heading(), []
    for name in options.sections or SECTIONS:
        for row in SECTIONS[name]():
            goal = f"{row.goal}: {met(bool(row.is_met))}" if row.goal else ""
            cells.append((row.case, row.form, f"{row.value:,.3f} {row.unit}", row.note, goal))
    publish(f"{head}\n\n{table('case | form | value | | goal', cells)}", options.result)


if __name__ == "__main__":
    main()
