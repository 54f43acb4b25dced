"""Weights of engines: sleep, updates against manifests, and low-rank factors."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.base import EngineBase
from rollout.sglang import arguments as sglang
from rollout.vllm import arguments as vllm
from rollout.vllm.arguments import sleep_level
from rollout.weight_update import WeightUpdateState, take_factors
from slime_like.config import ModelConfig, RunConfig
from slime_like.errors import CheckpointError, EngineError, WeightSyncError
from slime_like.interfaces import BucketMetadata, Manifest, PauseMode, TensorEntry
from slime_like.interfaces.engine_limits import engine_limits
from slime_like.interfaces.weights import MODEL
from slime_like.models.dimensions import Attention, ForeignAttention, ModelDimensions
from slime_like.orchestration.rollout.engines import DeviceSwitch
from slime_like.weights.expected_tensors import expected_factors
from slime_like.weights.received import WeightReceiver
from tests.conftest import Tiny
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import write_checkpoint

SYNC, SAVE = False, True


@pytest.fixture
def dimensions(tmp_path: Path) -> ModelDimensions:
    return ModelDimensions.from_checkpoint(write_checkpoint(tmp_path / "model"))


def _config(tmp_path: Path, engine: str, every: int, **engine_args: Any) -> RunConfig:
    return RunConfig(
        run_dir=tmp_path / "run",
        steps=10,
        model={"path": tmp_path / "model"},
        rollout={"engine": engine, "engine_args": engine_args},
        checkpoint={"every": every},
        cluster={"placement": "colocated"},
    )


@pytest.mark.parametrize(
    ("keep_weights", "is_whole", "attention", "level"),
    [
        (SYNC, True, Attention(), 2),
        (SAVE, True, Attention(), 1),
        (SYNC, False, Attention(), 1),  # layers of a failed update have no memory
        (SYNC, True, ForeignAttention("x is BloomForCausalLM"), 1),
    ],
)
def test_sleep_level(
    dimensions: ModelDimensions, keep_weights: bool, is_whole: bool, attention: Attention, level: int
) -> None:
    assert sleep_level(keep_weights, is_whole, replace(dimensions, attention=attention)) == level


# No sampling follows a checkpoint at the last step (0, 10).
@pytest.mark.parametrize(("every", "keeps"), [(0, False), (10, False), (9, True), (1, True)])
def test_sglang_keeps_a_copy_if_sampling_follows_a_checkpoint(
    tmp_path: Path, dimensions: ModelDimensions, monkeypatch: pytest.MonkeyPatch, every: int, keeps: bool
) -> None:
    monkeypatch.setattr(sglang, "on_cpu", lambda: False)
    known = {"enable_weights_cpu_backup"}
    found = sglang.engine_arguments(_config(tmp_path, "sglang", every), 0, known)
    assert (found["enable_memory_saver"], found["enable_weights_cpu_backup"]) == (True, keeps)
    given = _config(tmp_path, "sglang", every, enable_weights_cpu_backup=True)
    assert sglang.engine_arguments(given, 0, known)["enable_weights_cpu_backup"]


def test_copies_in_the_plan(tmp_path: Path, dimensions: ModelDimensions) -> None:
    foreign = replace(dimensions, attention=ForeignAttention("x is BloomForCausalLM"))
    found = {
        (engine, every): (limits.keeps_weights(run, dimensions), limits.copies_weights(run, dimensions))
        for engine in ("vllm", "sglang", "transformers")
        for every in (0, 2)
        for run, limits in [(_config(tmp_path, engine, every), engine_limits(engine))]
    }
    assert found == {
        ("vllm", 0): (False, False),
        ("vllm", 2): (True, False),  # at a checkpoint, not at every step
        ("sglang", 0): (False, False),
        ("sglang", 2): (True, True),
        ("transformers", 0): (True, True),
        ("transformers", 2): (True, True),
    }
    run = _config(tmp_path, "vllm", 0)
    limits = engine_limits("vllm")
    assert limits.keeps_weights(run, foreign) and limits.copies_weights(run, foreign)


def test_engines_keep_weights_before_sampling_without_a_sync() -> None:
    slept: list[bool] = []
    trainers = cast(Any, SimpleNamespace(offload=lambda *_, **__: None, onload=lambda: None))
    engines = cast(Any, SimpleNamespace(sleep=slept.append, wake=lambda _: None))
    devices = DeviceSwitch((trainers, engines))
    for turn in (devices.generation, devices.training, devices.begin_sync, devices.end_sync):
        turn()
    devices.training(keep_weights=True)
    devices.generation()
    devices.begin_sync()
    assert slept == [SYNC, SAVE, SYNC]


class _Idle(EngineBase[None]):
    """An engine that is alive and does nothing."""

    def _alive(self) -> None: ...

    async def _freeze(self, mode: PauseMode) -> None: ...

    async def _thaw(self) -> None: ...

    async def _begin_update(self) -> None: ...


def test_no_part_of_an_update_reaches_sleeping_weights(
    tmp_path: Path, dimensions: ModelDimensions, rejects: Rejects
) -> None:
    async def scenario(keep_weights: bool) -> None:
        engine = _Idle(_config(tmp_path, "transformers", 0), 0, "idle")
        manifest = Manifest.of(load_file(tmp_path / "model" / "model.safetensors"))
        await engine.begin_update(1, manifest)
        await engine.sleep(keep_weights)
        calls = (
            lambda: engine.begin_update(2, manifest),
            lambda: engine.update(BucketMetadata("shm", {}, ())),
            lambda: engine.finish_update(1),
        )
        for awake in ((), ("kv_cache",)):
            await engine.wake(awake)
            for call in calls:
                with rejects(EngineError, "engine-asleep"):
                    await call()
        with contextlib.suppress(EngineError):  # still cannot sample
            await engine.wake(("weights",))
        await engine.begin_update(2, manifest)

    for keep_weights in (False, True):
        asyncio.run(scenario(keep_weights))


TARGETS = ("self_attn.q_proj", "layers.0.mlp.up_proj", "o_proj")


@pytest.fixture
def model(tiny: Tiny) -> Path:
    return tiny.model


def given(model: Path, engine: str, rank: int = 4, **lora: Any) -> RunConfig:
    settings = {"rank": rank, "targets": TARGETS, "sync": "adapter", **lora}
    return RunConfig(run_dir=Path("run"), model={"path": model, "lora": settings}, rollout={"engine": engine})


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (8, 8), (9, 16), (300, 512), (512, 512)])
def test_vllm_makes_room_for_the_rank(model: Path, rank: int, room: int) -> None:
    found = vllm._owned(given(model, "vllm", rank), 0)
    assert (found["enable_lora"], found["max_lora_rank"], found["max_loras"]) == (True, room, 2)
    assert found["lora_target_modules"] == ["o_proj", "q_proj", "up_proj"]


def test_sglang_gets_factors_only_without_merging(model: Path) -> None:
    found = sglang.engine_arguments(given(model, "sglang", 300), 0, ())
    assert (found["enable_lora"], found["max_lora_rank"], found["lora_strict_loading"]) == (True, 300, True)
    assert found["lora_target_modules"] == ["o_proj", "q_proj", "up_proj"]
    config = given(model, "sglang", sync="merged")
    assert not [name for name in vllm._owned(config, 0) | sglang.engine_arguments(config, 0, ()) if "lora" in name]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_sleeping_engines_keep_a_base_that_no_sync_brings(model: Path, engine: str) -> None:
    dimensions = ModelDimensions.from_checkpoint(model)
    for sync in ("adapter", "merged"):
        config = given(model, engine, sync=sync).model_copy(update={"steps": 1})
        limits = engine_limits(engine)
        assert limits.copies_weights(config, dimensions) is (sync == "adapter")
        assert engine == "vllm" or limits.keeps_weights(config, dimensions) is (sync == "adapter")


def test_the_first_factors(model: Path, tmp_path: Path, rejects: Rejects) -> None:
    """They are 0, or those of an adapter, until others have arrived."""
    receiver, shapes = WeightReceiver(), expected_factors(ModelConfig.model_validate(given(model, "vllm").model))
    zeros = take_factors(receiver, None, shapes)
    assert {name: tuple(each.shape) for name, each in zeros.items()} == shapes
    assert not any(each.any() for each in zeros.values())
    stored = {name: torch.full(shape, 2.0) for name, shape in shapes.items()}
    save_file(stored, tmp_path / "adapter_model.safetensors")
    read = take_factors(receiver, str(tmp_path), shapes)
    assert read.keys() == stored.keys() and all(torch.equal(read[name], each) for name, each in stored.items())
    receiver.kept = dict(stored)
    assert take_factors(receiver, None, shapes) == stored and receiver.kept == {}
    with rejects(CheckpointError, "tensors-do-not-fit"):
        take_factors(receiver, str(tmp_path), {**shapes, "another.lora_A.weight": (4, 8)})


TENSORS = {"model.norm.weight": torch.ones(4), "model.embed_tokens.weight": torch.ones(3, 4)}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
WHOLE = Manifest.of(TENSORS)


def _entries(dtype: str = "float32") -> list[TensorEntry]:
    return [TensorEntry(name, dtype, tuple(tensor.shape), 0, 0, 7) for name, tensor in TENSORS.items()]


def _changed(name: str, tensor: torch.Tensor) -> Manifest:
    return Manifest.of(TENSORS | {name: tensor})


def _nothing(state: WeightUpdateState) -> None:
    pytest.fail("the manifest was accepted")


def _update(state: WeightUpdateState, manifest: Manifest = WHOLE, version: int = 1) -> None:
    state.begin(version, manifest)
    state.check_bucket(_entries())
    received = {entry.name: entry.checksum for entry in _entries()}
    state.check_complete(version, received)
    state.commit(received)
    state.require_serving()


REJECTED: dict[str, tuple[str, Manifest, Callable[[WeightUpdateState], None]]] = {
    "an export without a tensor": ("incomplete-update", Manifest.of({"model.norm.weight": torch.ones(4)}), _nothing),
    "an export of another shape": ("incomplete-update", _changed("model.norm.weight", torch.ones(5)), _nothing),
    "an export with another tensor": ("incomplete-update", _changed("model.extra", torch.ones(4)), _nothing),
    "an adapter": ("update-target", replace(WHOLE, updates="adapter"), _nothing),
    "an adapter on mixed weights": (
        "update-target", WHOLE, lambda state: state.begin(3, replace(WHOLE, updates="head")),
    ),
    "another type": ("tensor-shape", WHOLE, lambda state: state.check_bucket(_entries("bfloat16"))),
    "a missing tensor": (
        "incomplete-update", WHOLE, lambda state: state.check_complete(2, dict.fromkeys([*TENSORS][:1], 7)),
    ),
    "another tensor": (
        "incomplete-update", WHOLE, lambda state: state.check_complete(2, dict.fromkeys([*TENSORS, "extra"], 7)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("code", "manifest", "then"), REJECTED.values(), ids=REJECTED)
def test_nothing_is_sampled_after_a_rejected_update(
    code: str, manifest: Manifest, then: Callable[[WeightUpdateState], None], rejects: Rejects
) -> None:
    state = WeightUpdateState("engine", dict.fromkeys((MODEL, "head"), SHAPES))
    _update(state)
    with rejects(WeightSyncError, code):
        state.begin(2, manifest)
        then(state)
    with rejects(EngineError, "mixed-weights"):
        state.require_serving()
    with rejects(WeightSyncError, "no-open-update"):
        state.check_bucket(_entries())
    _update(state, version=3)
    _update(state, replace(WHOLE, updates="head"), version=4)


def test_a_failed_adapter_is_repaired_by_the_next(rejects: Rejects) -> None:
    """If syncs send only factors, no model comes first."""
    state = WeightUpdateState("engine", {"adapter": SHAPES})
    adapter = replace(WHOLE, updates="adapter")
    state.begin(1, adapter)
    state.fail("a rank died")
    with rejects(WeightSyncError, "update-target"):
        state.begin(2, WHOLE)
    with rejects(EngineError, "mixed-weights"):
        state.require_serving()
    _update(state, adapter)
