"""The command ``python -m benchmarks.weights``."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.report import heading, met, parser, publish, table
from benchmarks.weights import changes, engine, transports

_COPY_SHARE_GOAL, _VERIFY_SHARE_GOAL, _FEWER_BYTES_GOAL = 1 / 3, 25.0, 10.0


def _transports(scratch: Path) -> str:
    copy, rows = transports.measure(scratch)
    nbytes, share = rows[0].nbytes, copy.seconds / rows[0].seconds
    columns = (
        "transport | GB sent | s | GB/s | CPU (s) | of a copy, by clock | by CPU of the slower side | bare (s) | "
        "bare CPU (s) | hashing (s) | with the engine's copy (s) | peak, sender (GiB) | receiver (GiB)"
    )
    cells = [
        [
            row.name,
            f"{row.wire_nbytes / 1e9:.3f}",
            f"{row.seconds:.3f}",
            f"{nbytes / row.seconds / 1e9:.2f}",
            _two(row.cpu_s),
            f"{100 * copy.seconds / row.seconds:.0f} %",
            f"{100 * copy.cpu_s / max(row.cpu_s):.0f} %",
            f"{row.unverified_s:.3f}",
            _two(row.unverified_cpu_s),
            _two(row.hash_s),
            f"{row.loaded_s:.3f}",
            f"{row.sender_peak / 2**30:.2f}",
            f"{row.receiver_peak / 2**30:.2f}",
        ]
        for row in rows
    ]
    return (
        f"## Transports\n\nA model of {nbytes / 2 / 1e6:.0f} million bfloat16 elements ({nbytes / 1e9:.2f} GB) to one "
        "engine in another process of this host, one thread each, buckets of 256 MiB; medians. A plain copy of the "
        f"same bytes: {copy.seconds:.3f} s ({nbytes / copy.seconds / 1e9:.2f} GB/s), {copy.cpu_s:.3f} s of processor "
        "time. Goal over shared memory: a third of a copy's speed before the engine's own copy. *CPU* is processor "
        "time of sender + receiver, which work at the same time; where others use the machine it says more than the "
        "clock. *Bare* is without any hashing. With delta, 2 % of the elements differ from the sync before.\n\n"
        f"{table(columns, cells)}\n\n"
        f"Shared memory at {100 * share:.0f} % of a copy's speed: goal {met(share >= _COPY_SHARE_GOAL)}."
    )


def _two(seconds: tuple[float, float]) -> str:
    return f"{seconds[0]:.3f} + {seconds[1]:.3f}"


def _changes(scratch: Path) -> str:
    parameters, rows = changes.measure(scratch)
    cells = []
    for rate in changes.RATES:
        selected = [row for row in rows if row.rate == rate]
        shares, ratios = [100 * row.changed_fraction for row in selected], [row.ratio for row in selected]
        goal = met(min(ratios) >= _FEWER_BYTES_GOAL) if rate == changes.RATES[0] else ""
        changed = [f"{share:.2f} %" for share in (shares[0], median(shares), shares[-1])]
        cells.append([f"{rate:g}", *changed, *(f"{r:.1f}" for r in (ratios[0], median(ratios), min(ratios))), goal])
    columns = "learning rate | changed, first step | median | last | fewer bytes, first step | median | least | goal"
    return (
        f"## Changes\n\nA Qwen3 of {parameters / 1e6:.1f} million parameters, AdamW with float32 weights, exported in "
        f"bfloat16 after every step; {changes.STEPS} steps at each rate. Goal at 1e-6: {_FEWER_BYTES_GOAL:.0f} times "
        f"fewer bytes.\n\n{table(columns, cells)}"
    )


def _engine(scratch: Path) -> str:
    cells = [
        [
            row.name,
            f"{row.nbytes / 2e6:.0f}",
            f"{row.seconds:.2f}",
            f"{row.nbytes / row.seconds / 1e9:.2f}",
            _two((row.send_hash_s, row.receive_hash_s)),
            f"{row.probe_s:.3f}",
            f"{row.verify_share:.0f} %",
            met(row.verify_share <= _VERIFY_SHARE_GOAL),
        ]
        for row in engine.measure(scratch)
    ]
    columns = (
        "engine | million elements | update (s) | GB/s | hashing, sender + engine (s) | probe (s) | verification | goal"
    )
    return (
        "## Engines\n\nBuckets of 256 MiB over shared memory into real engines, each in a separate process with one "
        "thread, as in a run, bfloat16: a whole update with loading and, on vLLM, repacking. Verification is "
        "the hashing on both sides, which other work partly hides, and the engine's part of the probe: an upper bound. "
        f"Goal: at most {_VERIFY_SHARE_GOAL:.0f} % of the sync.\n\n{table(columns, cells)}"
    )


PARTS: dict[str, Callable[[Path], str]] = {"transports": _transports, "changes": _changes, "engine": _engine}


def main() -> None:
    options = parser("Speed of weight syncs, savings of sending only changes, and cost of verification.")
    options.add_argument("parts", nargs="*", metavar="PART", choices=[*PARTS, []], default=[], help=", ".join(PARTS))
    chosen = options.parse_args()
    sections = [f"{heading()}\n"]
    for name in chosen.parts or PARTS:
        with tempfile.TemporaryDirectory(prefix="weights-benchmark-") as scratch:
            sections.append(f"{PARTS[name](Path(scratch))}\n")
        publish("\n".join(sections), chosen.result)


if __name__ == "__main__":
    main()
