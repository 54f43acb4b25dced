"""Whole syncs into a real engine: every transport, delta syncs, and failures half-way."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout.transformers.engine import TransformersEngine
from slime_like.errors import EngineError
from slime_like.interfaces import BucketMetadata, GenerationRequest, PromptInput, SamplingParams
from slime_like.orchestration.weight_sync import WeightSync
from slime_like.weights.quantization import dequantize, quantize
from slime_like.weights.transports.names import cleanup
from tests.engines.harness import run_config
from tests.engines.local_sync import SESSION, LocalEngines, LocalTrainers, QuantizedTrainers, new_sync

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=4)


class Setting:
    """One engine, one trainer, and syncs between them."""

    def __init__(self, model: Path, tmp_path: Path, transport: str, delta: str, quantization: str = "none") -> None:
        config = run_config(model, tmp_path / "run")
        update = {"transport": transport, "delta": delta, "directory": tmp_path / "buckets", "timeout_s": 20.0}
        sync = config.sync.model_copy(update={**update, "quantization": quantization})
        self.config = config.model_copy(update={"sync": sync})
        self.quantized = quantization != "none"
        self.buckets = tmp_path / "buckets"
        self.loop = asyncio.new_event_loop()
        self.trainers = (QuantizedTrainers if self.quantized else LocalTrainers)(model, self.buckets)
        self.engines = LocalEngines(TransformersEngine(self.config, 0), self.loop)
        self.engines.run(self.engines.engine.start())
        self.sync: WeightSync = new_sync(self.config, self.trainers, self.engines)

    def train(self, seed: int, elements: int = 3) -> None:
        """Change a few elements of every weight, like a step at a small learning rate."""
        generator = torch.Generator().manual_seed(seed)
        for weight in self.trainers.weights.values():
            flat = weight.view(-1)
            places = torch.randint(len(flat), (elements,), generator=generator)
            flat[places] += torch.randn(elements, generator=generator) * 0.1

    def serves(self, version: int) -> None:
        """Require that the engine has the trainer's weights, bit for bit, and samples with ``version``."""
        model = self.engines.engine.model
        for name, parameter in model.named_parameters():
            sent = self.trainers.weights[name]
            if self.quantized and name.endswith("_proj.weight"):
                sent = dequantize(*quantize(sent))
            ours, theirs = sent.view(torch.int32), parameter.data.view(torch.int32)
            assert np.array_equal(ours.numpy(), theirs.numpy()), name
        (generation,) = self.engines.run(
            self.engines.engine.generate(GenerationRequest(f"g{version}", PromptInput([3, 4]), GREEDY))
        )
        assert set(generation.weight_versions.tolist()) == {version}

    def refuses(self) -> None:
        with pytest.raises(EngineError, match="mixed weights"):
            self.engines.run(self.engines.engine.generate(GenerationRequest("refused", PromptInput([3, 4]), GREEDY)))

    def close(self) -> None:
        self.trainers.close()
        self.engines.run(self.engines.engine.stop())
        self.loop.close()
        assert cleanup(SESSION) == []
        assert not self.buckets.exists() or list(self.buckets.iterdir()) == []


@pytest.fixture(params=[("gloo", "always")])
def setting(request: pytest.FixtureRequest, models: list[Path], tmp_path: Path) -> Iterator[Setting]:
    opened = Setting(models[0], tmp_path, *request.param)
    yield opened
    opened.close()


EVERY_WAY = [(name, delta) for name in ("shared_memory", "gloo", "directory") for delta in ("never", "always")]


@pytest.mark.parametrize("setting", EVERY_WAY, indirect=True, ids="-".join)
def test_transports(setting: Setting) -> None:
    delta = setting.config.sync.delta == "always"
    reports = []
    for version in range(1, 4):
        setting.train(version)
        reports.append(setting.sync.run(version))
        setting.serves(version)
    whole = sum(weight.numel() * 4 for weight in setting.trainers.weights.values())
    assert [report.nbytes for report in reports] == [whole] * 3
    assert reports[0].wire_nbytes == whole
    assert all((report.wire_nbytes < whole / 20) is delta for report in reports[1:])
    assert [report.changed_fraction is not None for report in reports] == [False, delta, delta]
    for report in reports:
        assert report.probe_gap is not None and report.probe_gap < 1e-4
        assert 0 < report.verification_s < report.total_s
        assert f"over {setting.config.sync.transport}" in str(report)


EIGHT_BITS = [("shared_memory", "never"), ("gloo", "always"), ("directory", "always")]


@pytest.mark.parametrize("setting", [(*way, "fp8_blocks") for way in EIGHT_BITS], indirect=True, ids="-".join)
def test_8_bit_weights(setting: Setting) -> None:
    """Matrices have one byte per element, and 4 per block. Of changes, bytes that differ are sent."""
    reports = []
    for version in range(1, 4):
        setting.train(version)
        reports.append(setting.sync.run(version))
        setting.serves(version)
    weights = setting.trainers.weights
    matrices = {name: weight for name, weight in weights.items() if name.endswith("_proj.weight")}
    blocks = sum(-(-len(weight) // 128) * -(-weight.shape[1] // 128) for weight in matrices.values())
    whole = sum((1 if name in matrices else 4) * weight.numel() for name, weight in weights.items()) + 4 * blocks
    assert [report.nbytes for report in reports] == [whole] * 3
    delta = setting.config.sync.delta == "always"
    assert all((report.wire_nbytes < whole / 8) is delta for report in reports[1:])
    assert all(0.01 < (report.probe_gap or 0) < 1 for report in reports)


def test_engine_without_its_copy_gets_everything(setting: Setting) -> None:
    """A restarted engine connects to senders that still have bases."""
    setting.sync.run(1)
    setting.train(2)
    engine = setting.engines.engine
    rendezvous: list[dict[str, object]] = []
    connect = setting.engines.connect
    setting.engines.connect = lambda name, where: (rendezvous.append(where), connect(name, where))[1]  # type: ignore[method-assign, func-returns-value]
    setting.sync.connect()
    setting.sync.run(2)  # both sides have bases again
    setting.engines.run(engine.connect("gloo", rendezvous[-1]))  # a receiver without bases
    setting.train(3)
    report = setting.sync.run(3)
    setting.serves(3)
    assert report.wire_nbytes == report.nbytes
    assert len(rendezvous) == 2  # once above, once for the whole sync
    setting.train(4)
    assert setting.sync.run(4).wire_nbytes < report.nbytes / 20
    setting.serves(4)


@pytest.mark.parametrize("setting", [("shared_memory", "never"), ("gloo", "always")], indirect=True, ids="-".join)
def test_sender_lost_half_way(setting: Setting) -> None:
    """The engine does not sample until the next whole sync."""
    setting.sync.run(1)
    setting.train(2)
    send = setting.trainers.next_bucket
    calls = 0

    def lose() -> list[BucketMetadata | None]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise EngineError("trainer rank 0 died while exporting weights")
        return send()

    setting.trainers.next_bucket = lose  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="died while exporting"):
        setting.sync.run(2)
    setting.refuses()
    setting.trainers.next_bucket = send  # type: ignore[method-assign]
    setting.train(3)
    report = setting.sync.run(3)
    setting.serves(3)
    assert report.wire_nbytes == report.nbytes  # because the engine's bases are unknown
