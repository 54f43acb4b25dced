"""A run's timeline as one file in Chrome's trace format, which https://ui.perfetto.dev opens."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from slime_like.errors import DataError
from slime_like.observability.metrics import TIMELINE_FILE, read_lines
from slime_like.observability.timeline import EARLIER_FILE

Span = tuple[int, int, str, dict[str, Any]]
"""Begin and end in nanoseconds of the driver's clock, name, and details."""

_ORDER = ("driver", "trainer", "critic", "weight sync", "engine", "rewards")
"""Beginnings of the names of processes, from the top of the page."""
_NESTED = ("steps", "phases")
"""Tracks with spans inside spans. Others have several lanes."""


def write_trace(run_dir: Path, output: Path | None = None) -> tuple[Path, int]:
    """Write the trace, by default as ``run_dir/trace.json.gz``. Return its path, and the number of dropped spans.

    Raises ``DataError`` if the run has no timeline, or it is damaged.
    """
    files = [run_dir / name for name in (EARLIER_FILE, TIMELINE_FILE) if (run_dir / name).is_file()]
    if not files:
        remedy = "set logging.timeline: true in the next run"
        raise DataError("the run has no timeline", code="no-timeline", who=str(run_dir), remedy=remedy)
    tracks, clocks, dropped = _read(files)
    all_spans = [span for spans in tracks.values() for span in spans]
    first = min((begin for begin, *_ in all_spans), default=0)
    synced = {(own["start"], own["version"]): end for _, end, _, own in all_spans if "version" in own}
    events = list[dict[str, Any]]()
    for number, process in enumerate(sorted({name for name, _ in tracks}, key=_place), start=1):
        about = {"name": process, **clocks.get(process, {})}
        events += [{"ph": "M", "name": "process_name", "pid": number, "args": about}]
        events += [{"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}]
        lanes = [lane for (name, track), spans in tracks.items() if name == process for lane in _lanes(track, spans)]
        for lane, (track, spans) in enumerate(lanes, start=1):
            events.append({"ph": "M", "name": "thread_name", "pid": number, "tid": lane, "args": {"name": track}})
            for begin, end, name, details in spans:
                where = {"pid": number, "tid": lane}
                times = {"ts": (begin - first) / 1e3, "dur": (end - begin) / 1e3}
                events.append({"ph": "X", "name": name, **where, **times, "args": details})
                for version in range(*details.get("versions", (0, 0))):
                    if begin < (at := synced.get((details["start"], version + 1), 0)) < end:
                        name, ts = f"version {version + 1}", (at - first) / 1e3
                        events.append({"ph": "i", "name": name, **where, "ts": ts, "s": "t"})
    path = output or run_dir / "trace.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"began_ns": first}}, file)
    return path, dropped


def _read(files: list[Path]) -> tuple[dict[tuple[str, str], list[Span]], dict[str, dict[str, int]], int]:
    """Return all spans by process and track, the last offset of every process's clock, and how many were dropped."""
    tracks, clocks, dropped = defaultdict[tuple[str, str], list[Span]](list), dict[str, dict[str, int]](), 0
    start = to_wall = 0
    for _, line in (line for file in files for line in read_lines(file)):
        if "clock_ns" in line:
            to_wall, start = line["time_ns"] - line["clock_ns"], start + ("continues" not in line)
            continue
        dropped += line["dropped"]
        if line["error_ns"]:
            clocks[line["process"]] = {"clock_offset_ns": line["offset_ns"], "clock_error_ns": line["error_ns"]}
        for track, name, begin, end, details in line["spans"]:
            process, _, thread = (track if "/" in track else f"{line['process']}/{track}").rpartition("/")
            times = (at + line["offset_ns"] + to_wall for at in (begin, end))
            tracks[process, thread].append((*times, name, {**details, "start": start}))
    return tracks, clocks, dropped


def _lanes(track: str, spans: list[Span]) -> list[tuple[str, list[Span]]]:
    """Divide a track's spans so that those of a lane don't overlap, or are inside each other if the track nests."""
    lanes = list[tuple[list[Span], list[int]]]()  # spans, and ends of the open ones
    for span in sorted(spans, key=lambda span: (span[0], -span[1])):
        for _, opened in lanes:
            while opened and opened[-1] <= span[0]:
                opened.pop()
        fits = (lane for lane in lanes if not lane[1] or (track in _NESTED and span[1] <= lane[1][-1]))
        if (lane := next(fits, None)) is None:
            lanes.append(lane := ([], []))
        lane[0].append(span)
        lane[1].append(span[1])
    return [(f"{track} {number}" if number > 1 else track, lane) for number, (lane, _) in enumerate(lanes, start=1)]


def _place(process: str) -> tuple[int, str]:
    return next((at for at, name in enumerate(_ORDER) if process.startswith(name)), len(_ORDER)), process
