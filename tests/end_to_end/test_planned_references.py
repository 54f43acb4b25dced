"""Plans of runs with references of other sizes."""

import pytest

from tests.unit.planning.test_arithmetic import MODELS, PUBLISHED
from tests.unit.planning.test_references import planned


def test_a_larger_reference_is_planned_with_its_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--reference.path", str(MODELS / "Qwen3-4B"), "--reference.parallel.tensor", "4"]
    plan = planned(monkeypatch, *flags, "--cluster.nodes", "2", "--algorithm.minibatches", "1")
    assert plan.problems == [] and plan.gpus_in_use == 16  # the policy takes the rest
    (kind,) = plan.references
    assert kind.estimate.memory.parameters * 4 == pytest.approx(PUBLISHED["Qwen3-4B"], rel=0.01)
    assert kind.phases[0] in plan.phases and kind.phases[0].items[0].nbytes == 2 * kind.estimate.memory.parameters
    assert plan.step is not None and plan.step.references > 0 and plan.step.scoring == 0


def test_a_wrong_reference_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its vocabulary differs from the policy's, and it does not fit the GPU."""
    flags = ["--cluster.gpu_memory_gib", "5", "--reference.path", str(MODELS / "Qwen2.5-7B")]
    problems = planned(monkeypatch, "--cluster.nodes", "2", *flags).problems
    for word in ("has 152064 tokens and model.path 151936", "GPU memory, reference scoring: "):
        assert any(word in problem for problem in problems), problems
