"""Plans and results of a save survive the conversion to plain values and back."""

import json

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from backends.common.checkpoint.plans import plan_from_plain, plan_to_plain, results_from_plain, results_to_plain


def test_torchs_global_plan_of_plain_plans_is_unchanged() -> None:
    state = {"a.b": torch.ones(2, 3), "scalar": torch.tensor(1.0), "half": torch.zeros(0, dtype=torch.bfloat16)}
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    own = planner.create_local_plan()
    plain = plan_from_plain(json.loads(json.dumps(plan_to_plain(own))))
    assert plain == own
    plans, metadata = planner.create_global_plan([plain, plain])
    expected_plans, expected = DefaultSavePlanner().create_global_plan([own, own])
    assert plans == expected_plans and metadata == expected
    assert [plan_from_plain(json.loads(json.dumps(plan_to_plain(plan)))) for plan in plans] == plans


def test_an_object_in_a_plan_is_rejected() -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner({"a": {"b": object()}}, is_coordinator=True)
    with pytest.raises(TypeError):
        plan_to_plain(planner.create_local_plan())
    names = [["a", None, None], "TENSOR", [0], [1], "load", [1]]
    with pytest.raises(TypeError):
        plan_from_plain({"items": [names], "names": None})


def test_results() -> None:
    index = MetadataIndex("a.b", torch.Size([2, 0]), 3)
    results = [
        WriteResult(index, 40, _StorageInfo("__0_0.distcp", 8, 40)),
        WriteResult(MetadataIndex("scalar"), 4, _StorageInfo("__0_0.distcp", 48, 4)),
    ]
    found = results_from_plain(json.loads(json.dumps(results_to_plain(results))))
    assert found == results and found[0].index.index == 3
