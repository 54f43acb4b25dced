"""The command ``python -m benchmarks.weights``."""

import argparse
import datetime
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from benchmarks.step.machine import describe_machine, load_average
from benchmarks.weights import changes, engine, transports

_COPY_SHARE_GOAL, _VERIFY_SHARE_GOAL, _FEWER_BYTES_GOAL = 1 / 3, 25.0, 10.0


def main(arguments: Sequence[str] | None = None) -> None:
    parts: dict[str, Callable[[Path], str]] = {
        "transports": _transports,
        "changes": _changes,
        "engine": _engine,
    }
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; all by default")
    parser.add_argument("--result", type=Path, help="write the tables to this file, too")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.parts) - set(parts))
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}; choose from {', '.join(parts)}")
    command = " ".join(["python -m benchmarks.weights", *options.parts])
    text = (
        f"{datetime.date.today()}, {describe_machine()}, load average {load_average():.1f} at the start, `{command}`.\n"
    )
    print(text)
    for name in options.parts or parts:
        with tempfile.TemporaryDirectory(prefix="weights-benchmark-") as scratch:
            section = parts[name](Path(scratch))
        print(section, flush=True)
        text += f"\n{section}"
    if options.result:
        options.result.write_text(text)


def _transports(scratch: Path) -> str:
    copy, rows = transports.measure(scratch)
    nbytes = rows[0].nbytes
    lines = [
        f"## Transports\n\nA model of {nbytes / 2 / 1e6:.0f} million bfloat16 elements ({nbytes / 1e9:.2f} GB) to one "
        "engine in another process of this host, one thread each, buckets of 256 MiB; medians. A plain copy of the "
        f"same bytes: {copy.seconds:.3f} s ({nbytes / copy.seconds / 1e9:.2f} GB/s), {copy.cpu_s:.3f} s of processor "
        "time. Goal over shared memory: a third of a copy's speed before the engine's own copy. *CPU* is processor "
        "time of sender + receiver, which work at the same time; where others use the machine it says more than the "
        "clock. *Bare* is without any hashing. With delta, 2 % of the elements differ from the sync before.\n",
        "| transport | GB sent | s | GB/s | CPU (s) | of a copy, by clock | by CPU of the slower side | bare (s) | "
        "bare CPU (s) | hashing (s) | with the engine's copy (s) | peak, sender (GiB) | receiver (GiB) |",
        "|---|---:|---:|---:|---|---:|---:|---:|---|---|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.name} | {row.wire_nbytes / 1e9:.3f} | {row.seconds:.3f} | {nbytes / row.seconds / 1e9:.2f} | "
            f"{_two(row.cpu_s)} | {100 * copy.seconds / row.seconds:.0f} % | "
            f"{100 * copy.cpu_s / max(row.cpu_s):.0f} % | {row.unverified_s:.3f} | {_two(row.unverified_cpu_s)} | "
            f"{_two(row.hash_s)} | {row.loaded_s:.3f} | {row.sender_peak / 2**30:.2f} | "
            f"{row.receiver_peak / 2**30:.2f} |"
        )
    share = copy.seconds / rows[0].seconds
    lines.append(f"\nShared memory at {100 * share:.0f} % of a copy's speed: goal {_met(share >= _COPY_SHARE_GOAL)}.\n")
    return "\n".join(lines)


def _two(seconds: tuple[float, float]) -> str:
    return f"{seconds[0]:.3f} + {seconds[1]:.3f}"


def _changes(scratch: Path) -> str:
    parameters, rows = changes.measure(scratch)
    lines = [
        f"## Changes\n\nA Qwen3 of {parameters / 1e6:.1f} million parameters, AdamW with float32 weights, exported in "
        f"bfloat16 after every step; {changes._STEPS} steps at each rate. Goal at 1e-6: {_FEWER_BYTES_GOAL:.0f} times "
        "fewer bytes.\n",
        "| learning rate | changed, first step | median | last | fewer bytes, first step | median | least | goal |",
        "|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for rate in changes.RATES:
        selected = [row for row in rows if row.rate == rate]
        shares, ratios = [100 * row.changed_fraction for row in selected], [row.ratio for row in selected]
        goal = _met(min(ratios) >= _FEWER_BYTES_GOAL) if rate == changes.RATES[0] else ""
        lines.append(
            f"| {rate:g} | {shares[0]:.2f} % | {median(shares):.2f} % | {shares[-1]:.2f} % | {ratios[0]:.1f} | "
            f"{median(ratios):.1f} | {min(ratios):.1f} | {goal} |"
        )
    return "\n".join(lines) + "\n"


def _engine(scratch: Path) -> str:
    rows = engine.measure(scratch)
    lines = [
        "## Engines\n\nBuckets of 256 MiB over shared memory into real engines, each in a separate process with one "
        "thread, as in a run, bfloat16: a whole update with loading and, on vLLM, repacking. Verification is "
        "the hashing on both sides, which other work partly hides, and the engine's part of the probe: an upper bound. "
        "Goal: at most "
        f"{_VERIFY_SHARE_GOAL:.0f} % of the sync.\n",
        "| engine | million parameters | update (s) | GB/s | hashing, sender + engine (s) | probe (s) | "
        "verification | goal |",
        "|---|---:|---:|---:|---|---:|---:|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.name} | {row.nbytes / 2e6:.0f} | {row.seconds:.2f} | {row.nbytes / row.seconds / 1e9:.2f} | "
            f"{row.send_hash_s:.3f} + {row.receive_hash_s:.3f} | {row.probe_s:.3f} | "
            f"{row.verify_share:.0f} % | {_met(row.verify_share <= _VERIFY_SHARE_GOAL)} |"
        )
    return "\n".join(lines) + "\n"


def _met(met: bool) -> str:
    return "met" if met else "NOT met"


if __name__ == "__main__":
    main()
