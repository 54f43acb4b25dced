"""Models and settings that an engine's class rejects before anything starts."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout.base import EngineBase
from slime_like.config import ModelConfig
from slime_like.errors import EngineError
from slime_like.orchestration.run import engines
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import EXPERTS, write_checkpoint


def test_a_model_that_the_engine_cannot_update_is_rejected_before_it_starts(tmp_path: Path, rejects: Rejects) -> None:
    model = ModelConfig(path=write_checkpoint(tmp_path, **EXPERTS))
    with rejects(EngineError, "model-not-servable"):
        engines.require_servable("vllm", model, on_cuda=False)
    engines.require_servable("vllm", model, on_cuda=True)


def test_an_engine_without_routes_is_named(monkeypatch: pytest.MonkeyPatch, rejects: Rejects) -> None:
    for kind in (EngineBase, object):
        monkeypatch.setattr(engines, "load_engine", lambda _, kind=kind: kind)
        engines.require_servable("my_engine", ModelConfig(path=Path("model")), on_cuda=False)
        with rejects(EngineError, "no-routes") as caught:
            engines.require_servable("my_engine", ModelConfig(path=Path("model")), on_cuda=False, routes=True)
        assert "my_engine" in str(caught.value)
    monkeypatch.setattr(engines, "load_engine", lambda _: SimpleNamespace(returns_routes=True))
    engines.require_servable("my_engine", ModelConfig(path=Path("model")), on_cuda=False, routes=True)
