"""Which of many steps with failures are reported."""

from typing import Any

from slime_like.orchestration.run.scoring_failures import ScoringFailures

TIMEOUT: dict[str, Any] = {"reason": "timeout"}
RESPONSES = 64


def error(detail: str, function: str = "mine:f") -> dict[str, Any]:
    return {"reason": "error", "function": function, "detail": detail}


def step_of(*failed: dict[str, Any]) -> list[dict[str, Any]]:
    return [*({} for _ in range(RESPONSES - len(failed))), *failed]


def reported(steps: list[list[dict[str, Any]]]) -> dict[int, str]:
    failures = ScoringFailures()
    notes = {step: failures.add(step, metadata) for step, metadata in enumerate(steps, start=1)}
    return {step: note for step, note in notes.items() if note}


def test_the_same_failure_is_reported_more_and_more_rarely() -> None:
    """Counted are steps with failures: those without lie between them. The error's text alone is no other kind."""
    steps = [step_of(error(f"ValueError: {step} (a.py:3)")) if step % 2 else step_of() for step in range(1, 41)]
    assert list(reported(steps)) == [1, 3, 7, 15, 31]


def test_a_kind_of_failure_not_seen_before_is_reported_at_once_and_quoted() -> None:
    """At steps that are no power of two: another exception, another function, another reason. Once each."""
    old = error("ValueError: old (a.py:3)")
    others = [error("KeyError: new (a.py:9)"), error("ValueError: new (b.py:1)", "other:f"), TIMEOUT]
    steps = [step_of(old, old)] * 20
    for step, other in zip((5, 6, 7, 9, 10, 11), others * 2, strict=True):
        steps[step - 1] = step_of(old, other)
    notes = reported(steps)
    assert list(notes) == [1, 2, 4, 5, 6, 7, 8, 16]
    assert "(2 by error, first: KeyError: new (a.py:9))" in notes[5]
    assert "first: ValueError: new (b.py:1)" in notes[6]
    assert "(1 by error, 1 by timeout, first: ValueError: old" in notes[7]


def test_a_share_that_doubles_is_reported_at_once() -> None:
    """In terms of the largest one reported, not of the step before: it may also grow little by little."""
    counts = [4, 4, 4, 4, 5, 6, 7, 8, 15, 16, 31, 20, 32, 33, 64, 33, 64, 64]
    notes = reported([step_of(*[TIMEOUT] * count) for count in counts])
    assert list(notes) == [1, 2, 4, 8, 10, 13, 15, 16]
    assert notes[13].startswith("step 13, reward: scoring failed for 32 of 64 responses (32 by timeout)")


def test_the_end_counts_every_step() -> None:
    failures = ScoringFailures()
    assert failures.add(1, step_of()) is None and failures.at_end() is None
    for step in range(2, 9):
        failures.add(step, step_of(TIMEOUT, error("ValueError: x")))
    said = "all steps: scoring failed for 14 of 512 responses (7 by error, 7 by timeout); they got reward 0"
    assert failures.at_end() == said
