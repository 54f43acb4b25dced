"""Put bugs into syncs of 8-bit weights, one at a time: the manifest or the probe must catch each.

The probe's bound is wider than for other syncs, because the trainer scores it with weights that are not rounded.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.transformers import engine as transformers_engine
from rollout.transformers.engine import TransformersEngine
from slime_like.errors import EngineError, WeightSyncError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import GenerationRequest, PromptInput, SamplingParams
from slime_like.weights import quantization
from slime_like.weights.quantization import quantize
from tests.engines.harness import run_config
from tests.engines.local_sync import LocalEngines, QuantizedTrainers, new_sync
from tests.support.rejections import Rejects

Read = Callable[[Tensor, Tensor], Tensor]
right: Read = quantization.dequantize


def not_scaled(elements: Tensor, scales: Tensor) -> Tensor:
    return elements.float()


def scale_inverted(elements: Tensor, scales: Tensor) -> Tensor:
    return right(elements, 1 / scales)


def grid_transposed(elements: Tensor, scales: Tensor) -> Tensor:
    return right(elements, scales.t().reshape(scales.shape))


def scale_of_the_next_block(elements: Tensor, scales: Tensor) -> Tensor:
    return right(elements, scales.flatten().roll(1).view(scales.shape))


def no_last_columns(elements: Tensor, scales: Tensor) -> Tensor:
    """Drop the ragged block."""
    found = right(elements, scales)
    found[:, found.shape[1] // 128 * 128 :] = 0
    return found


def no_last_block_in_the_export(patch: pytest.MonkeyPatch) -> None:
    def wrong(weight: Tensor) -> tuple[Tensor, Tensor]:
        return quantize(no_last_columns(*quantize(weight)))

    patch.setattr(quantization, "quantize", wrong)


def no_scales_in_the_export(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quantization, "quantize", lambda weight: (weight.to(torch.float8_e4m3fn), quantize(weight)[1]))


def old_weights_in_the_export(patch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    patch.setattr(quantization, "quantize", lambda weight: quantize(torch.randn(weight.shape, generator=generator)))


def no_scales_in_the_manifest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quantization, "_infos", lambda manifest: dict(manifest.tensors))


def read_by(wrong: Read) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(quantization, "dequantize", wrong)


def a_scale_of_another_matrix(patch: pytest.MonkeyPatch) -> None:
    """Hashes are right, because every tensor arrived."""
    held: list[Tensor] = []

    def wrong(elements: Tensor, scales: Tensor) -> Tensor:
        held.append(scales)
        return right(elements, next(each for each in held if each.shape == scales.shape))

    patch.setattr(quantization, "dequantize", wrong)


def never_loaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transformers_engine, "dequantized", lambda tensors: ())


READ = [not_scaled, scale_inverted, grid_transposed, scale_of_the_next_block, no_last_columns]
EXPORT = [no_last_block_in_the_export, no_scales_in_the_export, old_weights_in_the_export]
CASES = [
    *[pytest.param(read_by(wrong), "probe-gap", id=wrong.__name__) for wrong in READ],
    *[pytest.param(wrong, "probe-gap", id=wrong.__name__) for wrong in [*EXPORT, a_scale_of_another_matrix]],
    pytest.param(no_scales_in_the_manifest, "incomplete-update", id="no_scales_in_the_manifest"),
    pytest.param(never_loaded, "probe-gap", id="never_loaded"),
]


@pytest.mark.parametrize(("bug", "code"), CASES)
def test_the_verification_catches(
    synced: tuple[QuantizedTrainers, LocalEngines, Any],
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[pytest.MonkeyPatch], None],
    code: str,
    rejects: Rejects,
) -> None:
    """Also in a run's first sync, which has no baseline."""
    trainers, engines, sync = synced
    train(trainers)
    for baseline in (sync._probe.baseline, None):
        sync._probe.baseline = baseline
        with monkeypatch.context() as patch:
            bug(patch)
            with rejects(WeightSyncError, code):
                sync.run(101)
    report = sync.run(102)  # succeeds without the bug
    assert report.probe_gap > 1e-3
    serves(trainers, engines)


def train(trainers: QuantizedTrainers) -> None:
    """Change every weight by much more than rounding, but not their sizes."""
    for weight in trainers.weights.values():
        weight.copy_(weight.roll(1, 0))


def serves(trainers: QuantizedTrainers, engines: LocalEngines) -> None:
    for name, parameter in engines.engine.model.named_parameters():
        weight = trainers.weights[name]
        expected = right(*quantize(weight)) if name.endswith("_proj.weight") else weight
        assert torch.equal(parameter, expected), name


@pytest.fixture(scope="module")
def synced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[QuantizedTrainers, LocalEngines, Any]]:
    root = tmp_path_factory.mktemp("quantized")
    make_tiny_model(root / "model", hidden_size=320, intermediate_size=448)
    config = run_config(root / "model", root / "run")
    config = config.model_copy(update={"sync": config.sync.model_copy(update={"quantization": "fp8_blocks"})})
    loop = asyncio.new_event_loop()
    trainers = QuantizedTrainers(root / "model", root, num_senders=1)
    sizes = torch.tensor([[0.5, 2.0, 1.0], [1.5, 0.7, 0.3], [0.2, 1.0, 2.5], [1.2, 0.4, 0.8]])
    for index, (name, weight) in enumerate(trainers.weights.items()):
        if name.endswith("_proj.weight"):  # blocks and matrices differ in size, like in trained models
            grid = sizes.flatten().roll(index).view((4, 3) if weight.shape[1] == 320 else (3, 4))
            weight *= grid.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(weight), : weight.shape[1]]
    engines = LocalEngines(TransformersEngine(config, 0), loop)
    engines.run(engines.engine.start())
    with pytest.raises(EngineError, match="before its first update"):
        request = GenerationRequest("early", PromptInput([3, 4]), SamplingParams(temperature=0.0, max_new_tokens=4))
        engines.run(engines.engine.generate(request))
    sync = new_sync(config, trainers, engines)
    sync.run(100)
    yield trainers, engines, sync
    trainers.close()
    engines.run(engines.engine.stop())
    loop.close()
