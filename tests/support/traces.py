"""Reading of traces, with the rules of Chrome's trace event format."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def tracks_of(path: Path) -> dict[tuple[str, str], list[Event]]:
    """Return the events by the names of their process and track, in order. Spans of a track are inside each other, or
    apart."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {(each["name"], each["pid"], each.get("tid")): each["args"] for each in events if each["ph"] == "M"}
    tracks = defaultdict[tuple[str, str], list[Event]](list)
    for each in events:
        if each["ph"] == "M":
            continue
        assert each["ph"] in "Xi" and each["ts"] >= 0 and each.get("dur", 0) >= 0
        assert each["ph"] == "X" or each["s"] in "tpg"
        pid, tid = each["pid"], each["tid"]
        tracks[names["process_name", pid, None]["name"], names["thread_name", pid, tid]["name"]].append(each)
    for own in tracks.values():
        own.sort(key=lambda each: (each["ts"], -each.get("dur", 0)))
        opened: list[float] = []
        for each in own:
            while opened and opened[-1] <= each["ts"] + 1e-6:
                opened.pop()
            end = each["ts"] + each.get("dur", 0)
            assert not opened or end <= opened[-1] + 1e-6, f"{each} overlaps another span"
            opened.append(end)
    return dict(tracks)
