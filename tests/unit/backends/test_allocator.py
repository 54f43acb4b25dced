"""Memory may be in expandable segments unless another process maps it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from backends.common.process.rendezvous import allocator_problems, use_expandable_segments
from rollout.sglang.arguments import memory_saver_problem
from slime_like.config import RunConfig

ALONE = {"cluster": {"placement": "colocated"}}  # one engine on the only rank's device: auto is colocated
BESIDE: dict[str, Any] = {}
OURS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def _config(**sections: Any) -> RunConfig:
    return RunConfig(run_dir=Path("run"), model={"path": "model"}, **sections)


@pytest.mark.parametrize(
    ("sections", "environment", "expandable", "rejected"),
    [
        (BESIDE, {}, True, False),
        (ALONE, {}, False, False),
        (ALONE | {"sync": {"transport": "shared_memory"}}, {}, True, False),
        (ALONE | {"sync": {"transport": "colocated"}}, {}, False, False),
        (ALONE | {"algorithm": {"loss": "sft"}}, {}, True, False),
        (ALONE, OURS, False, True),
        (ALONE | {"sync": {"transport": "shared_memory"}}, OURS, False, False),
        (BESIDE, OURS, False, False),  # the user's setting stays
        (BESIDE, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, False, False),
    ],
)
def test_segments_expand_unless_engines_map_them(
    sections: dict[str, Any],
    environment: dict[str, str],
    expandable: bool,
    rejected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    config = _config(**sections)
    mapped, transport = config.engines_map_memory, config.sync.transport
    use_expandable_segments(mapped, environment)
    assert settings == ["expandable_segments:True"] * expandable
    problems = list(allocator_problems(transport, mapped, environment))
    assert [OURS.items() <= environment.items() for _ in problems] == [True] * rejected


@pytest.mark.parametrize(("sections", "rejected"), [(ALONE, True), (BESIDE, False)])
def test_sglangs_memory_saver_rejects_expandable_segments(sections: dict[str, Any], rejected: bool) -> None:
    config = _config(**sections)
    problem = memory_saver_problem(config.rollout, config.cluster, OURS)
    assert (problem is not None) is rejected
    assert not rejected or "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in str(problem)
    assert memory_saver_problem(config.rollout, config.cluster, {}) is None
