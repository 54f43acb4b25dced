"""The timeline of a run and its trace."""

import time
from pathlib import Path
from typing import Any

import pytest

from slime_like.commands.main import main
from slime_like.errors import DataError
from slime_like.observability import timeline
from slime_like.observability.metrics import TIMELINE_FILE
from slime_like.observability.report.trace import write_trace
from slime_like.observability.timeline import Timeline
from slime_like.observability.timing import PhaseClock
from slime_like.system import spans
from slime_like.system.spans import Spans, add_span, span
from tests.support.rejections import Rejects
from tests.support.traces import tracks_of


def test_a_trace_shows_all_processes_on_one_clock(tmp_path: Path) -> None:
    """The other machine's clock is an hour ahead, and the first answer comes late."""
    hour, run, clock = 3600 * 10**9, Timeline(tmp_path, 0), PhaseClock()
    with clock.phase("generate"):
        begin = time.perf_counter_ns()
        time.sleep(0.02)
    with clock.phase("train"):
        at = time.perf_counter_ns()
        time.sleep(0.01)
    seconds = clock.finish("step 1")
    for first, last, versions in ((0, 10, [0, 0]), (5, 18, [0, 1]), (12, 20, [1, 1])):
        add_span("engine 0/requests", f"r{first}", begin + first * 10**6, begin + last * 10**6, versions=versions)
    add_span("weight sync/updates", "version 1", begin + 10 * 10**6, begin + 11 * 10**6, version=1)

    def far(name: str, dropped: int = 0) -> dict[str, Spans]:
        own = [("phases", name, at + hour, at + hour + 9, dict[str, Any]())]
        return {"trainer rank 1": Spans(own, dropped, time.perf_counter_ns() + hour, "another")}

    def take() -> dict[str, Spans]:
        time.sleep(0.05)
        ours = Spans([("phases", "accumulate", at, at + 10**6, {})], 0, time.perf_counter_ns(), run._own_clock)
        return {"trainer rank 0": ours, **far("score", 2)}

    run.write(1, take)
    run.write(2, lambda: far("train"))
    run.close()
    path, dropped = write_trace(tmp_path)
    tracks = tracks_of(path)
    assert dropped == 2 and path == tmp_path / "trace.json.gz"
    times = {name: [each for each in own if each["ph"] == "X"] for name, own in tracks.items()}
    found = {name: [(each["name"], each["ts"], each["dur"]) for each in own] for name, own in times.items()}
    (step, _, total), *phases, (written, _, cost) = found["driver", "steps"]
    assert written == "timeline" and cost > 50e3
    assert step == "step 1" and total / 1e6 == pytest.approx(sum(seconds.values()), abs=1e-9)
    assert {name: dur / 1e6 for name, _, dur in phases} == pytest.approx({n: seconds[n] for n in ("generate", "train")})
    assert [name for name, *_ in found["engine 0", "requests"]] == ["r0", "r12"]
    assert [name for name, *_ in found["engine 0", "requests 2"]] == ["r5"]
    [update] = [each for each in tracks["engine 0", "requests 2"] if each["ph"] == "i"]
    [(_, synced, lasted)] = found["weight sync", "updates"]
    assert (update["name"], update["ts"]) == ("version 1", pytest.approx(synced + lasted))
    [(_, same, _)] = found["trainer rank 0", "phases"]
    late, soon = (each[1] for each in found["trainer rank 1", "phases"])
    assert abs(soon - same) < 10e3 < abs(late - same) < 60e3  # half of the second round trip, and of the first


def test_a_later_start_continues_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_MOST_BYTES", 400)
    for finished in (0, 1):
        run = Timeline(tmp_path, finished)
        for step in (2, 3):
            with span("driver/steps", f"step {step}"):
                pass
            run.write(step)
        run.close()
    assert main(["report", str(tmp_path), "--trace"]) == 0 and tracks_of(tmp_path / "trace.json.gz")
    path = tmp_path / TIMELINE_FILE
    path.write_text(path.read_text() + '{"step": 4, "pro')  # killed while it wrote
    [own] = tracks_of(write_trace(tmp_path, tmp_path / "there" / "t.json.gz")[0]).values()
    assert (tmp_path / timeline.EARLIER_FILE).is_file()
    assert [(each["name"], each["args"]["start"]) for each in own if each["name"] != "timeline"][-2:] == [
        ("step 2", 2),
        ("step 3", 2),
    ]
    times = [each["ts"] for each in own]
    assert times == sorted(times) and times[0] == 0


def test_spans_that_nobody_takes_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    spans.take_spans()
    monkeypatch.setattr(spans, "_spans", type(spans._spans)(maxlen=3))
    for number in range(5):
        add_span("a/b", str(number), 0, 1)
    taken = spans.take_spans()
    assert ([each[1] for each in taken.spans], taken.dropped) == (["2", "3", "4"], 2)


def test_a_run_without_a_timeline(tmp_path: Path, rejects: Rejects) -> None:
    with rejects(DataError, "no-timeline"):
        write_trace(tmp_path)
