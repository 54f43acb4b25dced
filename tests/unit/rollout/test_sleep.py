"""Sleeping engines that keep a copy of their weights in host memory, and those that drop them."""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from safetensors.torch import load_file

from rollout.base import EngineBase
from rollout.sglang import arguments as sglang
from rollout.vllm.arguments import sleep_level
from slime_like.checks.engine_arguments import can_keep_weights, copies_weights
from slime_like.config import RunConfig
from slime_like.errors import EngineError
from slime_like.interfaces import BucketMetadata, Manifest, PauseMode
from slime_like.models.dimensions import Attention, ForeignAttention, ModelDimensions
from slime_like.orchestration.rollout.colocation import Turns
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
        (engine, every): (can_keep_weights(run, dimensions), copies_weights(run, dimensions))
        for engine in ("vllm", "sglang", "transformers")
        for every in (0, 2)
        for run in [_config(tmp_path, engine, every)]
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
    assert can_keep_weights(run, foreign) and copies_weights(run, foreign)


def test_engines_keep_weights_before_sampling_without_a_sync() -> None:
    slept: list[bool] = []
    trainers = cast(Any, SimpleNamespace(offload=lambda *_, **__: None, onload=lambda: None))
    engines = cast(Any, SimpleNamespace(sleep=slept.append, wake=lambda _: None))
    devices = Turns((trainers, engines))
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
