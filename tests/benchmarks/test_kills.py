"""Which kills and stops are drawn, what counts as bad, and that a bad one shows."""

from dataclasses import replace

from benchmarks.kills.campaign import Case, draw
from benchmarks.kills.table import render
from benchmarks.kills.victims import PHASES, VICTIMS

GOOD = Case(
    "raylet", "SIGKILL", "sync", outcome="ended", seconds=29.0, sentence="raylet | x", code=1, resumed=(4, True)
)


def test_every_class_is_killed_and_stopped_in_different_phases() -> None:
    cases = draw(list(VICTIMS), seed=0)
    assert len(cases) == 60 and cases == draw(list(VICTIMS), seed=0) != draw(list(VICTIMS), seed=1)
    for victim in VICTIMS:
        own = [case for case in cases if case.victim == victim]
        assert sorted(case.how for case in own) == ["SIGKILL"] * 3 + ["SIGSTOP"] * 2
        assert len({case.phase for case in own} & set(PHASES)) == 5


def test_a_late_wrong_or_littering_case_is_bad_and_is_marked() -> None:
    bad = [
        replace(GOOD, seconds=31.0),
        replace(GOOD, how="SIGSTOP", seconds=121.0),
        replace(GOOD, outcome="hung"),
        replace(GOOD, named=False),
        replace(GOOD, left=["/dev/shm/x"]),
        replace(GOOD, audit=False),
        replace(GOOD, resumed=(4, False)),
    ]
    good = [GOOD, replace(GOOD, how="SIGSTOP", seconds=119.0), replace(GOOD, outcome="goes on", seconds=200.0)]
    assert [case.is_good for case in bad + good] == [False] * len(bad) + [True] * len(good)
    rows = [line for line in render(bad + good, 9, "vllm", 0).splitlines() if line.startswith("| raylet")]
    assert len(rows) == 10 and sum("**!**" in row for row in rows) == len(bad)
    assert all("raylet \\| x" in row for row in rows)
