"""How many devices a run reserves, and how it numbers ranks along nodes."""

from pathlib import Path
from typing import Any

import pytest

from slime_like.config import RunConfig
from slime_like.orchestration.cluster.bundles import bundle_sizes

REFERENCES = {"placement": "workers", "workers": 2, "parallel": {"tensor": 2}}


def config(tmp_path: Path, **sections: Any) -> RunConfig:
    return RunConfig(run_dir=tmp_path / "run", model={"path": tmp_path}, **sections)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, [1, 1]),
        ({"trainer": {"parallel": {"data": 2}}, "rollout": {"num_engines": 2, "tensor": 4}}, [1, 1, 4, 4]),
        ({"trainer": {"parallel": {"tensor": 4}}, "cluster": {"placement": "colocated"}}, [1, 1, 1, 1]),
        ({"trainer": {"parallel": {"data": 2}}, "algorithm": {"loss": "sft"}}, [1, 1]),
        ({"debug": {"load_rollouts": "rollouts"}}, [1]),
        ({"reference": REFERENCES}, [1, 1]),  # no reference is needed
        ({"reference": REFERENCES, "algorithm": {"kl_coef": 0.1}, "rollout": {"tensor": 2}}, [1, 2, 1, 1, 1, 1]),
        ({"reference": REFERENCES, "algorithm": {"kl_coef": 0.1}, "debug": {"load_rollouts": "rollouts"}}, [1]),
    ],
)
def test_bundles(tmp_path: Path, sections: dict[str, Any], expected: list[int]) -> None:
    assert bundle_sizes(config(tmp_path, **sections)) == expected


def test_evaluation_reserves_engines_alone(tmp_path: Path) -> None:
    colocated = config(tmp_path, rollout={"num_engines": 3}, cluster={"placement": "colocated"})
    assert bundle_sizes(colocated, with_trainers=False) == [1, 1, 1]
