"""Timeouts that follow from other settings or that the user gives."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_like.config import RunConfig
from slime_like.orchestration.rollout import engine_group


def _config(**sections: Any) -> RunConfig:
    return RunConfig(run_dir=Path("run"), model={"path": "model"}, **sections)


@pytest.mark.parametrize(
    ("rollout", "evaluation", "expected"),
    [
        ({"max_new_tokens": 3000}, {}, 600),
        ({"max_new_tokens": 16_384}, {}, 3276.8),
        ({"max_new_tokens": 1024}, {"max_new_tokens": 8192}, 1638.4),  # held-out responses may be longer
        ({"max_new_tokens": 16_384, "request_timeout_s": 30}, {}, 30),
    ],
)
def test_a_request_may_take_as_long_as_its_longest_response(
    rollout: dict[str, Any], evaluation: dict[str, Any], expected: float
) -> None:
    assert _config(rollout=rollout, evaluation=evaluation).request_timeout_s == pytest.approx(expected)


@pytest.mark.parametrize(("device", "given", "expected"), [("GPU", None, 1200), ("CPU", None, 300), ("GPU", 40, 40)])
def test_engines_on_gpus_have_more_time_to_start(
    device: str, given: float | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor receives the same timeout as the driver."""
    started: list[RunConfig] = []
    actor = SimpleNamespace(remote=lambda config, *_: started.append(config))
    remote = SimpleNamespace(options=lambda **_: actor)
    monkeypatch.setattr(engine_group, "ray", SimpleNamespace(remote=lambda _: remote))
    placement: Any = SimpleNamespace(
        device=device, engine_nodes=1, engine_options=lambda *_: {}, shared_ranks=lambda *_: range(0)
    )
    engine_group.EngineGroup(_config(rollout={"start_timeout_s": given}), placement).launch()
    assert [config.engine_start_timeout_s for config in started] == [expected]
