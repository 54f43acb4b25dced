"""Warnings about steps that teach nothing."""

import pytest

from slime_like.observability.flat_reward import FlatSteps, Truncation

# which of the steps from 1 on were flat (x), the steps with a warning, and whether one comes at the end
RUNS = [
    ("xxxxxxxxxxxx", {5}, True),
    ("xxxx.xxxx.", set(), False),
    ("xx.xxxxxxx.xxxxxx", {8}, False),
    ("xx", set(), True),
    (".", set(), False),
    ("", set(), False),
]


@pytest.mark.parametrize(("run", "warned", "at_end"), RUNS, ids=[case[0] for case in RUNS])
def test_it_warns_once_and_at_the_end(run: str, warned: set[int], at_end: bool) -> None:
    steps = FlatSteps(None)
    said = {step: steps.add(step, kind == "x") for step, kind in enumerate(run, start=1)}
    assert {step for step, sentence in said.items() if sentence is not None} == warned
    for step in warned:
        assert str(said[step]).startswith(f"steps {step - 4} to {step}: the responses to each prompt all got ")
    assert (steps.at_end() is not None) == at_end


def test_a_resumed_run_counts_only_its_steps() -> None:
    steps = FlatSteps("run/tables/samples.jsonl")
    assert steps.add(41, flat=True) is None
    sentence = str(steps.at_end())
    assert sentence.startswith("step 41: ")
    assert sentence.endswith("; responses and rewards are in run/tables/samples.jsonl")
    steps.add(42, flat=True)
    assert str(steps.at_end()).startswith("all steps from 41 to 42: ")


def test_cut_responses_are_reported_once() -> None:
    steps = Truncation("were cut off", "rollout.max_new_tokens=24", "raise it")
    assert steps.add(1, 0.49) is None
    assert str(steps.add(2, 0.95)).startswith(
        "step 2: 95% of the responses were cut off (limits: rollout.max_new_tokens=24), "
    )
    assert steps.add(3, 1.0) is None
