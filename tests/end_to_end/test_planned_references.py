"""References of other sizes, planned whole."""

import pytest

from tests.unit.planning.test_arithmetic import MODELS, PUBLISHED
from tests.unit.planning.test_references import REFUSED, planned


def test_a_larger_reference_is_planned_with_its_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GPUs hold its weights, however small the policy is."""
    flags = ["--reference.path", str(MODELS / "Qwen3-4B"), "--reference.parallel.tensor", "4"]
    plan = planned(monkeypatch, *flags, "--cluster.nodes", "2", "--algorithm.minibatches", "1")
    assert plan.problems == [] and plan.gpus_in_use == 16  # a policy that fills what references leave
    (kind,) = plan.references
    assert kind.estimate.memory.parameters * 4 == pytest.approx(PUBLISHED["Qwen3-4B"], rel=0.01)
    assert kind.phases[0] in plan.phases and kind.phases[0].items["parameters"] == 2 * kind.estimate.memory.parameters
    assert plan.step is not None and plan.step.references > 0 and plan.step.scoring == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([*REFUSED, "--reference.parallel.tensor", "3"], ["reference.parallel.tensor=3 does not divide the model's"]),
        ([*REFUSED, "--reference.path", "/nowhere"], ["reference.path=/nowhere does not exist"]),
        (
            ["--cluster.gpu_memory_gib", "5", "--reference.path", str(MODELS / "Qwen2.5-7B")],
            [
                "has 152064 tokens and model.path 151936",
                "GPU memory, reference scoring: ",
            ],
        ),
    ],
)
def test_what_is_wrong_with_them_is_a_problem(
    flags: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that is not one of the cluster's, too."""
    plan = planned(monkeypatch, "--cluster.nodes", "2", *flags)
    for word in words:
        assert [problem for problem in plan.problems if word in problem], plan.problems
        assert not [note for note in plan.notes if word in note]
