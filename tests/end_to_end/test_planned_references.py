"""Plans with references of other sizes."""

import pytest

from slime_like.config.reading.load import load_config
from slime_like.planning.plan import make_plan
from slime_like.planning.planned_run import PlannedRun
from slime_like.planning.result import Plan
from tests.support.published import ROOT
from tests.unit.planning.test_arithmetic import MODELS, PUBLISHED

REJECTED = ("--trainer.parallel.tensor", "3")  # nothing is traced then, which would take seconds


def planned(monkeypatch: pytest.MonkeyPatch, *flags: str) -> Plan:
    monkeypatch.chdir(ROOT)
    small = "--trainer.target_tokens_per_batch 2048 --rollout.max_new_tokens 512 --algorithm.kl.coef 0.1"
    workers = [*small.split(), "--reference.placement", "workers", *flags]
    return make_plan(PlannedRun.of(load_config(ROOT / "configs" / "qwen2.5_0.5b.yaml", workers)))


def test_a_larger_reference_is_planned_with_its_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GPUs hold its own weights, which are larger than the policy's."""
    flags = ["--reference.path", str(MODELS / "Qwen3-4B"), "--reference.parallel.tensor", "4"]
    plan = planned(monkeypatch, *flags, "--cluster.nodes", "2", "--algorithm.minibatches", "1")
    assert plan.problems == [] and plan.gpus_in_use == 16  # the policy fills the GPUs that references leave
    (kind,) = plan.references
    assert kind.estimate.memory.parameters * 4 == pytest.approx(PUBLISHED["Qwen3-4B"], rel=0.01)
    assert kind.phases[0] in plan.phases and kind.phases[0].items["parameters"] == 2 * kind.estimate.memory.parameters
    assert plan.step is not None and plan.step.references > 0 and plan.step.scoring == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([*REJECTED, "--reference.parallel.tensor", "3"], ["reference.parallel.tensor=3 does not divide the model's"]),
        ([*REJECTED, "--reference.path", "/nowhere"], ["reference.path=/nowhere does not exist"]),
        (
            ["--cluster.gpu_memory_gib", "5", "--reference.path", str(MODELS / "Qwen2.5-7B")],
            ["has 152064 tokens and model.path 151936", "GPU memory, reference scoring: "],
        ),
    ],
)
def test_what_is_wrong_with_them_is_a_problem(
    flags: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine does not belong to the cluster, so only settings are problems."""
    plan = planned(monkeypatch, "--cluster.nodes", "2", *flags)
    for word in words:
        assert [problem for problem in plan.problems if word in problem], plan.problems
        assert not [note for note in plan.notes if word in note]
