"""Put bugs into syncs of low-rank factors, one at a time: the first sync must catch each, although B is 0.

The run's own ``WeightSync`` sends factors to a real engine. Without the bug the sync must succeed.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.transformers import weights
from rollout.transformers.engine import TransformersEngine
from slime_like.config import RunConfig
from slime_like.errors import WeightSyncError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import Manifest
from slime_like.interfaces.weights import MODEL
from slime_like.orchestration.weight_sync import WeightSync
from tests.engines.harness import run_config
from tests.engines.local_adapter import LocalAdapterTrainers
from tests.engines.local_sync import LocalEngines, new_sync
from tests.engines.test_adapters import with_factors
from tests.support.rejections import Rejects

Patch = pytest.MonkeyPatch


# ------------------------------------------------------------------------------------------------------------ the bugs
def the_engine_receives_factors_and_ignores_them(patch: Patch, trainers: LocalAdapterTrainers) -> None:
    """Their hashes are right, and the engine claims to serve them."""

    patch.setattr(weights, "serve_adapter", lambda *_: None)


def the_engine_forgets_alpha(patch: Patch, trainers: LocalAdapterTrainers) -> None:
    serve = weights.serve_adapter
    patch.setattr(
        weights,
        "serve_adapter",
        lambda engine, settings, *source: serve(engine, {**settings, "lora_alpha": 6}, *source),
    )


def the_engine_keeps_one_factor_of_zeros(patch: Patch, trainers: LocalAdapterTrainers) -> None:
    take = weights.take_factors

    def wrong(*arguments: Any) -> Any:
        factors = take(*arguments)
        name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
        return {**factors, name: torch.zeros_like(factors[name])}

    patch.setattr(weights, "take_factors", wrong)


def the_export_is_a_zero_adapter(patch: Patch, trainers: LocalAdapterTrainers) -> None:
    zeros = {name: torch.zeros(shape) for name, shape in trainers.shapes.items()}
    patch.setattr(trainers, "exported", lambda: zeros)


def the_export_has_the_matrices_of_keys_and_values_swapped(patch: Patch, trainers: LocalAdapterTrainers) -> None:
    def other(name: str) -> str:
        return name.replace("k_proj", "-").replace("v_proj", "k_proj").replace("-", "v_proj")

    patch.setattr(trainers, "exported", lambda: {name: trainers.factors[other(name)] for name in trainers.shapes})


def the_export_forgets_a_factor(patch: Patch, trainers: LocalAdapterTrainers) -> None:
    patch.setattr(trainers, "exported", lambda: dict(list(trainers.factors.items())[1:]))


def the_merged_base_is_sent_as_the_base(patch: Patch, trainers: LocalAdapterTrainers) -> None:
    """The engine would add the product to it once more."""
    begin = LocalAdapterTrainers.begin_export
    patch.setattr(trainers, "exported", lambda: trainers.weights)
    patch.setattr(trainers, "begin_export", lambda: [Manifest(part.tensors, MODEL) for part in begin(trainers)])


def the_trial_changes_nothing(patch: Patch, trainers: LocalAdapterTrainers) -> None:
    """It could then not prove anything."""
    trial = trainers.perturb_adapter
    patch.setattr(trainers, "perturb_adapter", lambda size: trial(size and 0.0))


Bug = Callable[[Patch, LocalAdapterTrainers], None]
BUGS: dict[Bug, str] = {
    the_engine_receives_factors_and_ignores_them: "probe-gap",
    the_engine_forgets_alpha: "probe-gap",
    the_engine_keeps_one_factor_of_zeros: "probe-gap",
    the_export_is_a_zero_adapter: "probe-gap",
    the_export_has_the_matrices_of_keys_and_values_swapped: "probe-gap",
    the_export_forgets_a_factor: "incomplete-update",
    the_merged_base_is_sent_as_the_base: "update-target",
    the_trial_changes_nothing: "trial-unnoticed",
}


class Setting:
    """One engine, one trainer, and syncs of factors between them."""

    def __init__(self, model: Path, root: Path, **sync: Any) -> None:
        config = with_factors(run_config(model, root / "run"))
        self.config: RunConfig = config.model_copy(update={"sync": config.sync.model_copy(update=sync)})
        self.loop = asyncio.new_event_loop()
        self.trainers = LocalAdapterTrainers(model, root, self.config.model.lora)
        self.engines = LocalEngines(TransformersEngine(self.config, 0), self.loop)
        self.engines.run(self.engines.engine.start())

    def new_sync(self) -> WeightSync:
        return new_sync(self.config, self.trainers, self.engines)

    def close(self) -> None:
        self.trainers.close()
        self.engines.run(self.engines.engine.stop())
        self.loop.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_tiny_model(directory, "qwen3", max_position_embeddings=1024)
    return directory


@pytest.fixture(scope="module")
def setting(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    opened = Setting(model, tmp_path_factory.mktemp("factors"))
    yield opened
    opened.close()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_the_first_sync_catches(setting: Setting, monkeypatch: Patch, bug: Bug, rejects: Rejects) -> None:
    with monkeypatch.context() as patch:
        bug(patch, setting.trainers)
        with rejects(WeightSyncError, BUGS[bug]):
            setting.new_sync().run(1)
    setting.trainers.perturb_adapter(None)  # after a failed run, ranks end
    setting.new_sync().run(2)


def test_without_a_trial_ignored_factors_go_unnoticed(setting: Setting, monkeypatch: Patch, rejects: Rejects) -> None:
    """Until B changes: at least then the engine's logprobs differ."""
    the_engine_receives_factors_and_ignores_them(monkeypatch, setting.trainers)
    sync = setting.new_sync()
    sync._probe.trial_due = False
    sync.run(3)
    setting.trainers.train(1)
    with rejects(WeightSyncError, "probe-gap"):
        sync.run(4)


@pytest.mark.parametrize(("transport", "delta"), [("shared_memory", "never"), ("gloo", "always")])
def test_syncs_send_only_factors(model: Path, tmp_path: Path, transport: str, delta: str) -> None:
    """A trial precedes the first one and leaves no trace. Then training changes the factors."""
    setting = Setting(model, tmp_path, transport=transport, delta=delta)
    try:
        sync, before = setting.new_sync(), setting.trainers.factors
        for version in range(1, 4):
            report = sync.run(version)
            assert report.nbytes == sum(4 * 6 * sum(weight.shape) for weight in _targets(setting.trainers))
            assert report.probe_gap is not None and report.probe_gap < 1e-4
            assert setting.trainers.factors is before
            setting.trainers.train(version)
    finally:
        setting.close()


def _targets(trainers: LocalAdapterTrainers) -> list[torch.Tensor]:
    """Return the weights of the layers' projections."""
    return [weight for name, weight in trainers.weights.items() if name.endswith("_proj.weight")]
