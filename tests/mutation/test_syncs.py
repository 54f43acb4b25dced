"""Put bugs into weight syncs, one at a time: the verification of the sync must catch each.

The run's own ``WeightSync`` sends weights, 8-bit weights or low-rank factors to a real engine. Without the bug the sync
must succeed: a crash is no proof. Of 8-bit weights, the probe's bound is wider, because the trainer scores with weights
that are not rounded. Of factors, the first sync must catch each, although B is 0.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.transformers.engine import TransformersEngine
from slime_like.errors import EngineError, WeightSyncError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import GenerationRequest, PromptInput, SamplingParams
from slime_like.orchestration.weight_sync import WeightSync
from slime_like.weights import quantization
from slime_like.weights.quantization import dequantize, quantize
from tests.engines.harness import run_config
from tests.engines.local_adapter import LocalAdapterTrainers
from tests.engines.local_sync import LocalEngines, LocalTrainers, QuantizedTrainers, new_sync
from tests.engines.test_adapters import with_factors
from tests.support.planted import Bug, Patch, name_of, plant, read_bugs
from tests.support.rejections import Rejects


class Setting:
    """One engine, one trainer, and syncs of weights between them."""

    def __init__(self, root: Path, **sync: Any) -> None:
        self.root, self.loop = root, asyncio.new_event_loop()
        self.make_model(root / "model")
        config = self.configured(run_config(root / "model", root / "run"))
        self.config = config.model_copy(update={"sync": config.sync.model_copy(update=sync)})
        self.trainers: Any = self.make_trainers()
        self.engines = LocalEngines(TransformersEngine(self.config, 0), self.loop)
        self.engines.run(self.engines.engine.start())
        self.begin()

    def make_model(self, path: Path) -> None:
        make_tiny_model(path, family="qwen3", seed=0)

    def configured(self, config: Any) -> Any:
        return config

    def make_trainers(self) -> LocalTrainers:
        return LocalTrainers(self.root / "model", self.root, num_senders=1)

    def begin(self) -> None:
        self.sync = self.new_sync()
        self.sync.run(100)

    def new_sync(self) -> WeightSync:
        return new_sync(self.config, self.trainers, self.engines)

    def train(self) -> None:
        generator = torch.Generator().manual_seed(7)
        for weight in self.trainers.weights.values():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)

    def syncs(self) -> Iterator[tuple[WeightSync, int]]:
        """Yield syncs, and the versions that they would send, which must fail with a bug."""
        yield self.sync, 101

    def succeed(self) -> None:
        """Without a bug."""
        self.sync.run(102)

    def close(self) -> None:
        self.trainers.close()
        self.engines.run(self.engines.engine.stop())
        self.loop.close()


class Quantized(Setting):
    """Blocks and matrices differ in size, like in trained models."""

    def make_model(self, path: Path) -> None:
        make_tiny_model(path, hidden_size=320, intermediate_size=448)

    def configured(self, config: Any) -> Any:
        return config.model_copy(update={"sync": config.sync.model_copy(update={"quantization": "fp8_blocks"})})

    def make_trainers(self) -> LocalTrainers:
        trainers = QuantizedTrainers(self.root / "model", self.root, num_senders=1)
        sizes = torch.tensor([[0.5, 2.0, 1.0], [1.5, 0.7, 0.3], [0.2, 1.0, 2.5], [1.2, 0.4, 0.8]])
        for index, (name, weight) in enumerate(trainers.weights.items()):
            if name.endswith("_proj.weight"):
                grid = sizes.flatten().roll(index).view((4, 3) if weight.shape[1] == 320 else (3, 4))
                weight *= grid.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(weight), : weight.shape[1]]
        return trainers

    def begin(self) -> None:
        with pytest.raises(EngineError, match="before its first update"):
            request = GenerationRequest("early", PromptInput([3, 4]), SamplingParams(temperature=0.0, max_new_tokens=4))
            self.engines.run(self.engines.engine.generate(request))
        super().begin()

    def train(self) -> None:
        """Change every weight by much more than rounding, but not their sizes."""
        for weight in self.trainers.weights.values():
            weight.copy_(weight.roll(1, 0))

    def syncs(self) -> Iterator[tuple[WeightSync, int]]:
        """Also as in a run's first sync, which has no baseline."""
        for baseline in (self.sync._probe.baseline, None):
            self.sync._probe.baseline = baseline
            yield self.sync, 101

    def succeed(self) -> None:
        report = self.sync.run(102)
        assert report.probe_gap is not None and report.probe_gap > 1e-3
        for name, parameter in self.engines.engine.model.named_parameters():
            weight = self.trainers.weights[name]
            expected = dequantize(*quantize(weight)) if name.endswith("_proj.weight") else weight
            assert torch.equal(parameter, expected), name


class OfFactors(Setting):
    trainers: LocalAdapterTrainers

    def make_model(self, path: Path) -> None:
        make_tiny_model(path, "qwen3", max_position_embeddings=1024)

    def configured(self, config: Any) -> Any:
        return with_factors(config)

    def make_trainers(self) -> LocalTrainers:
        return LocalAdapterTrainers(self.root / "model", self.root, self.config.model.lora)

    def begin(self) -> None: ...

    def train(self) -> None: ...

    def syncs(self) -> Iterator[tuple[WeightSync, int]]:
        yield self.new_sync(), 1

    def succeed(self) -> None:
        self.trainers.perturb_adapter(None)  # after a failed run, ranks end
        self.new_sync().run(2)


# ------------------------------------------------------------------------------------------------------------ the bugs
def a_scale_of_another_matrix(patch: Patch) -> None:
    """Hashes are right, because every tensor arrived."""
    held: list[Tensor] = []

    def wrong(elements: Tensor, scales: Tensor) -> Tensor:
        held.append(scales)
        return dequantize(elements, next(each for each in held if each.shape == scales.shape))

    patch.setattr(quantization, "dequantize", wrong)


SETTINGS: dict[str, type[Setting]] = {"weights": Setting, "quantized": Quantized, "factors": OfFactors}
IGNORES = "the engine receives factors and ignores them"


def _table() -> list[tuple[type[Setting], str, list[Bug]]]:
    """Return what is synced, the error's code, and the edits of each bug."""
    table, bugs = [], list[Bug]()
    for bug, rows in read_bugs(Path(__file__).with_name("sync_bugs.txt")):
        bugs.append(a_scale_of_another_matrix if isinstance(bug, str) else bug)
        for kind, _, code in (row.partition(": ") for row in rows):
            table.append((SETTINGS[kind], code, bugs))
            bugs = []
    return table


TABLE = _table()


@pytest.fixture(scope="module")
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    opened = request.param(tmp_path_factory.mktemp("setting"))
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("setting", "code", "bugs"),
    [pytest.param(kind, code, bugs, id=f"{kind.__name__}-{name_of(bugs[0])}") for kind, code, bugs in TABLE],
    indirect=["setting"],
)
def test_the_verification_catches(setting: Setting, code: str, bugs: list[Bug], rejects: Rejects) -> None:
    setting.train()
    with plant(*bugs):
        for sync, version in setting.syncs():
            with rejects(WeightSyncError, code):
                sync.run(version)
    setting.succeed()


@pytest.mark.parametrize("setting", [OfFactors], indirect=True)
def test_without_a_trial_ignored_factors_go_unnoticed(setting: OfFactors, rejects: Rejects) -> None:
    """Until B changes: at least then the engine's logprobs differ."""
    ((bug,),) = [bugs for _, _, bugs in TABLE if name_of(bugs[0]) == IGNORES]
    with plant(bug):
        sync = setting.new_sync()
        sync._probe.trial_due = False
        sync.run(3)
        setting.trainers.train(1)
        with rejects(WeightSyncError, "probe-gap"):
            sync.run(4)


@pytest.mark.parametrize(("transport", "delta"), [("shared_memory", "never"), ("gloo", "always")])
def test_syncs_send_only_factors(tmp_path: Path, transport: str, delta: str) -> None:
    """A trial precedes the first one and leaves no trace. Then training changes the factors."""
    setting = OfFactors(tmp_path, transport=transport, delta=delta)
    try:
        sync, before = setting.new_sync(), setting.trainers.factors
        targets = [weight for name, weight in setting.trainers.weights.items() if name.endswith("_proj.weight")]
        for version in range(1, 4):
            report = sync.run(version)
            assert report.nbytes == sum(4 * 6 * sum(weight.shape) for weight in targets)
            assert report.probe_gap is not None and report.probe_gap < 1e-4
            assert setting.trainers.factors is before
            setting.trainers.train(version)
    finally:
        setting.close()
