"""The models of a run, where they compute, and what a worker of one is told."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config, save_config
from slime_like.config.roles import Roles
from slime_like.orchestration.cluster.bundles import pieces_of
from slime_like.orchestration.cluster.placement import Placement

WORKERS = {"placement": "workers", "workers": 2, "parallel": {"tensor": 2}, "path": "/models/ref"}
MIXTURE = {"data": {"mixture": [{"name": name, "files": ["/x.jsonl"]} for name in "ab"]}}
KL = {"algorithm": {"kl": {"coef": 0.1}}}


def config(**sections: Any) -> RunConfig:
    raw = {"run_dir": "/runs/x", "model": {"path": "/models/x", "weights": "/runs/w"}, "trainer": {"parallel": {}}}
    return RunConfig.model_validate(raw | sections)


TEACHER = {"coef": 1.0, "path": "/models/t"}
TEACHERS = {"coef": 1.0, "teachers": {"a": "/t", "b": "/u"}, "placement": "workers"}
AB = "distillation.teachers.a distillation.teachers.b"
# Sections, and the run's models: all, the ones on trainer ranks, the ones that score, and the ones on workers.
ROLES: list[tuple[dict[str, Any], str, str, str, str]] = [
    ({}, "policy", "", "", ""),
    ({"algorithm": {"minibatches": 2}}, "policy", "", "policy", ""),
    (KL, "policy reference", "reference", "reference", ""),
    ({"algorithm": {"kl_reward": {"coef": 0.1}}}, "policy reference", "reference", "policy reference", ""),
    (KL | {"reference": WORKERS}, "policy reference", "", "", "reference"),
    (
        KL | {"distillation": TEACHER},
        "policy reference distillation",
        "reference distillation",
        "policy reference distillation",
        "",
    ),
    ({"distillation": TEACHER | {"mode": "exact"}}, "policy distillation", "distillation", "distillation", ""),
    ({"distillation": TEACHERS} | MIXTURE, f"policy {AB}", "", "policy", AB),
    ({"algorithm": {"loss": "sft", "epochs": 2}}, "policy", "", "", ""),
]


@pytest.mark.parametrize(("sections", "roles", "held", "scoring", "workers"), ROLES)
def test_where_every_model_scores(sections: dict[str, Any], roles: str, held: str, scoring: str, workers: str) -> None:
    run = config(**sections)
    assert [*run.roles] == roles.split()
    found = [run.roles.values(), run.roles.held, run.roles.scoring, run.roles.with_workers]
    assert [" ".join(role.name for role in some) for some in found] == [roles, held, scoring, workers]
    assert [role.trained for role in run.roles.values()] == [name == "policy" for name in roles.split()]


def test_a_critic_or_worker_has_its_own_weights_and_layout() -> None:
    with pytest.raises(ValidationError, match=r"model\.weights=/runs/w has no value head"):
        config(algorithm={"advantage": "gae"})
    run = config(algorithm={"advantage": "gae"}, critic={"path": "/models/v"})
    assert (run.for_critic().model.path, run.for_critic().model.weights) == (Path("/models/v"), None)
    run = config(**KL, reference=WORKERS)
    worker = run.for_worker(run.roles["reference"])
    assert (worker.model.path, worker.model.weights) == (Path("/models/ref"), None)
    assert worker.trainer.parallel.tensor == 2 and run.trainer.parallel.tensor == 1
    same = config(**KL, reference=WORKERS | {"path": None})
    assert same.for_worker(same.roles["reference"]).model == same.model


def test_a_critic_has_the_policys_axes_but_the_given_ones(tmp_path: Path) -> None:
    """Neither does a saved configuration give the others."""
    sections = {"algorithm": {"advantage": "gae"}, "critic": {"path": "/models/v", "parallel": {"pipeline": 2}}}
    run = config(**sections, trainer={"parallel": {"tensor": 4, "sequence": True, "pipeline": 4}})
    save_config(run, tmp_path / "config.yaml")
    for each in (run, load_config(tmp_path / "config.yaml", ["--trainer.parallel.tensor", "8"])):
        found, policy = each.roles["critic"].parallel, each.trainer.parallel
        assert found == policy.model_copy(update={"pipeline": 2}) and policy.pipeline == 4


def test_workers_of_two_roles_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two reference workers of two ranks, then a teacher of four, two of them in a tensor-parallel group."""
    teacher = {**WORKERS, "workers": 1, "parallel": {"tensor": 2, "data": 2}}
    run, other = (config(**KL, reference=section) for section in (WORKERS, teacher))
    roles = [*run.roles.values(), other.reference.role("teacher", "teacher_logprobs")]
    monkeypatch.setattr(RunConfig, "roles", property(lambda self: Roles({role.name: role for role in roles})))
    assert pieces_of(run).workers == [2, 2, 2, 2]
    placement = Placement(run)
    placement._order = list(range(10))  # a trainer rank and an engine come first
    bundles = [
        placement._worker_bundle(worker, rank) for worker, ranks in enumerate((2, 2, 4)) for rank in range(ranks)
    ]
    assert bundles == list(range(2, 10))
    assert [role.name for role in placement.workers] == ["reference", "reference", "teacher"]


_ONLY_B = "--data.mixture '[{name: b, files: [y]}]'"


@pytest.mark.parametrize(
    ("flags", "teachers"),
    [
        ("", {"a": "/t", "b": "/u"}),
        ("--distillation.teachers.b /v", {"a": "/t", "b": "/v"}),
        ("--distillation.teachers none --distillation.path /v", {}),
        (f"--distillation.teachers none --distillation.teachers.b /v {_ONLY_B}", {"b": "/v"}),
    ],
)
def test_a_flag_removes_the_entries_of_a_mapping(tmp_path: Path, flags: str, teachers: dict[str, str]) -> None:
    save_config(config(**MIXTURE, distillation=TEACHERS), tmp_path / "run.yaml")
    found = load_config(tmp_path / "run.yaml", shlex.split(flags)).distillation.teachers
    assert found == {name: Path(path) for name, path in teachers.items()}
