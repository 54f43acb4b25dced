"""Times at which hanging workers are reported and ended, and which of several is."""

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

from slime_like.orchestration.cluster.hangs import Hang, HangWatch, WorkerPulse
from slime_like.orchestration.cluster.stopped import Ending, Stopped, recently_ended
from slime_like.system.heartbeat import Pulse

EVERY_S, AT_LEAST_S = 15.0, 300.0


def seen(role: str, phase: str = "train_minibatch", usual_s: float = 2.0, count: int = 5) -> WorkerPulse:
    return WorkerPulse(Stopped("10.0.0.1", 7, 100.0, role), Pulse(0.0, 0.0, count, usual_s, phase), (), 1.0)


def still(worker: WorkerPulse, seconds: float) -> WorkerPulse:
    return replace(worker, pulse=replace(worker.pulse, still_s=seconds), cpu_s=1.0 + seconds)


def silent(worker: WorkerPulse, seconds: float, runs: bool = False) -> WorkerPulse:
    return replace(worker, pulse=replace(worker.pulse, silent_s=seconds), cpu_s=1.0 + (seconds if runs else 0.0))


def history(frames: Iterable[list[WorkerPulse]], watch: HangWatch | None = None) -> dict[str, list[float]]:
    """Return the times of notes, and of each worker's end, if these are seen every ``EVERY_S`` seconds."""
    watch, found = watch or HangWatch(AT_LEAST_S), dict[str, list[float]](notes=[])
    for look, pulses in enumerate(frames, start=1):
        notes, ended = watch.look(pulses, look * EVERY_S)
        found["notes"] += [look * EVERY_S] * len(notes)
        for worker in ended:
            found.setdefault(worker.role, [look * EVERY_S])  # it is ended again until it is gone
    return found


def hanging(worker: WorkerPulse, until_s: float, after_s: float = 0.0) -> list[WorkerPulse]:
    looks = range(1, round(until_s / EVERY_S) + 1)
    return [still(worker, max(0.0, look * EVERY_S - after_s)) for look in looks]


@pytest.mark.parametrize(("usual_s", "bound_s"), [(2.0, 300.0), (100.0, 1000.0)])
def test_a_hang_is_reported_once_and_ended_after_ten_times_the_usual_wait(usual_s: float, bound_s: float) -> None:
    """A micro-batch that takes 100 s is neither ended for taking 300 s, nor reported each time."""
    for after_s in (0.0, 7.0, EVERY_S - 0.1):
        found = history([one] for one in hanging(seen("trainer-0", usual_s=usual_s), 1200.0, after_s))
        first, *others = found["notes"]
        assert 0 <= first - after_s - max(60, 2 * usual_s) <= EVERY_S
        assert others == found["trainer-0"] and bound_s <= others[0] - after_s <= bound_s + EVERY_S


def test_an_unknown_phase_is_only_reported_until_another_worker_has_finished_it() -> None:
    new = seen("engine-1", "generate", usual_s=0.0)
    assert history([one] for one in hanging(new, 3600.0)) == {"notes": [60.0]}
    watch = HangWatch(AT_LEAST_S)
    watch.look([seen("engine-0", "generate", usual_s=1.0)], 0.0)
    found = history(([one] for one in hanging(new, 315.0)), watch)
    assert found == {"notes": [60.0, 300.0], "engine-1": [300.0]}


def test_progress_and_idleness_end_a_hang() -> None:
    trainer = seen("trainer-0")
    frames = [*hanging(trainer, 240.0), *hanging(trainer, 240.0), *hanging(seen("trainer-0", phase=""), 1200.0)]
    assert history([one] for one in frames) == {"notes": [60.0, 300.0]}


def test_a_frozen_worker_is_ended_early_even_if_it_is_idle() -> None:
    """One that computes without a sign of life, as in an endless loop of its event loop, has more time."""
    idle = seen("engine-0", phase="", usual_s=0.0)
    looks = range(1, 60)
    frozen = history([silent(idle, look * EVERY_S)] for look in looks)
    assert frozen["notes"][0] == 60.0 and frozen["engine-0"][0] == 120.0
    for worker in (idle, seen("engine-0", "generate")):
        deaf = history([silent(worker, look * EVERY_S, runs=True)] for look in looks)
        assert deaf["notes"][0] == 60.0 and deaf["engine-0"][0] == 600.0


def test_of_ranks_in_a_collective_the_one_they_wait_for_is_ended() -> None:
    """The others then get their whole bound again: they may only have waited."""
    behind, ahead = seen("trainer-1", count=3), seen("trainer-0")
    engines = [seen("engine-0", "update", count=1), seen("engine-1", "update", count=2)]
    rows = zip(*(hanging(one, 585.0) for one in (ahead, behind, *engines)), strict=True)
    found = history(list(row) for row in rows)
    assert found.pop("notes")[-1] == 300.0
    assert found == {"trainer-1": [300.0], "engine-0": [300.0], "engine-1": [300.0]}
    notes, _ = HangWatch(AT_LEAST_S).look([still(ahead, 65.0), still(behind, 65.0)], 0.0)
    assert "of trainer-1 " in notes[0] and "furthest behind" in notes[0] and len(notes) == 1


def test_a_blocked_process_is_ended_before_those_with_less_progress() -> None:
    blocked = replace(seen("trainer-1"), blocked=(7,))
    rows = zip(hanging(blocked, 315.0), hanging(seen("trainer-0", count=3), 315.0), strict=True)
    found = history(list(row) for row in rows)
    assert found["trainer-1"] == [300.0] and "trainer-0" not in found
    watch = HangWatch(AT_LEAST_S)
    assert [len(watch.look([still(blocked, seconds)], seconds)[1]) for seconds in (285, 300, 315)] == [0, 1, 1]
    assert "in state D: 7" in str(Hang(blocked, 65.0, math.inf, "hangs"))


@pytest.mark.parametrize(
    ("role", "failure", "blamed"),
    [
        ("trainer-1", "trainer rank 1 died while training: its process 7 ended", True),
        ("trainer-1", "trainer rank 0 failed while training: a collective failed", True),
        ("engine-0", "trainer rank 0 died while training: its process 9 ended", False),
        ("engine-0.2", "engine 0 (vllm) died while generating", True),
        ("engine-0", "engine 1 (vllm) died while generating", False),
        ("engine-1", "engine 10 (vllm) died while generating", False),
        ("engine-0-node-1", "vLLM engine 0: its ranks on another node ended", True),
        ("reference-0", "reference worker 1 rank 0 died while scoring", True),
        ("reference-0", "the disk is full", False),
    ],
)
def test_a_failure_is_only_attributed_to_an_ended_worker_that_it_is_about(
    role: str, failure: str, blamed: bool
) -> None:
    ended = Ending(Stopped("10.0.0.1", 7, 100.0, role), 1000.0, f"{role} hung")
    assert recently_ended([ended], 1020.0, failure) == (ended if blamed else None)
    assert recently_ended([ended], 1090.0, failure) is None
