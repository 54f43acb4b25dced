"""Notes about responses that could not be scored."""

from typing import Any

from slime_like.orchestration.run.recorder import ScoringFailures, program_failures

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


def test_each_kind_of_failure_is_reported_once_and_quoted() -> None:
    """Another exception, function or reason is another kind; another text of an error is not."""
    old = error("ValueError: old (a.py:3)")
    others = [error("KeyError: new (a.py:9)"), error("ValueError: new (b.py:1)", "other:f"), TIMEOUT]
    steps = [step_of(), *([step_of(old, error("ValueError: text"))] * 11)]
    for step, other in zip((5, 6, 7, 9, 10, 11), others * 2, strict=True):
        steps[step - 1] = step_of(old, other)
    notes = reported(steps)
    assert list(notes) == [2, 5, 6, 7]
    assert "(2 by error, first: KeyError: new (a.py:9))" in notes[5]
    assert "first: ValueError: new (b.py:1)" in notes[6]
    assert "(1 by error, 1 by timeout, first: ValueError: old" in notes[7]


def test_the_end_counts_every_step() -> None:
    failures = ScoringFailures()
    assert failures.add(1, step_of()) is None and failures.at_end() is None
    for step in range(2, 9):
        failures.add(step, step_of(TIMEOUT | {"outcome": "masked"}, error("ValueError: x")))
    said = "all steps: scoring failed for 14 of 512 responses (7 by error, 7 by timeout); 7 masked, 7 zeroed"
    assert failures.at_end() == said


def test_a_step_is_reported_if_all_programs_of_agents_failed() -> None:
    def ended(*outputs: str) -> list[dict[str, Any]]:
        results = [{"exit_code": 3, "output": output} if output else {} for output in outputs]
        return [{"conversation": {"turns": [], "steps": [{**result, "endpoint": {}}]}} for result in results]

    said = "step 2, rollout.agent: all 2 programs failed (first: exit code 3: no key)"
    assert program_failures(2, ended("no key", "no model")) == said
    assert program_failures(2, ended("no key", "")) is None and program_failures(2, step_of()) is None
