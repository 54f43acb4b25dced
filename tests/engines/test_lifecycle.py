"""Rejected starts, and requests that take too long."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rollout.sglang.engine import SglangEngine
from rollout.transformers.engine import TransformersEngine
from rollout.vllm.engine import VllmEngine
from slime_like.checks.engine_arguments import _vllm_arguments
from slime_like.errors import CheckpointError, ConfigError, EngineError
from slime_like.interfaces import GenerationRequest, PromptInput, RolloutEngine, SamplingParams
from slime_like.system.processes import process_ids
from tests.engines.harness import run_config

LONG = SamplingParams(max_new_tokens=700, temperature=0.05, ignore_eos=True)


@pytest.mark.parametrize(
    ("kind", "rollout", "message"),
    [
        (VllmEngine, {"engine_args": {"no_such_argument": 1}}, "no_such_argument is not an argument of vllm"),
        (VllmEngine, {"start_timeout_s": 0.5}, r"rollout.start_timeout_s=0.5 s"),
        (VllmEngine, {"max_model_len": 4000}, r"did not start: ValidationError: (?!.*pydantic\.dev).*max_model_len"),
        (SglangEngine, {"engine_args": {"context_length": 64}}, "set rollout.max_model_len instead"),
        (SglangEngine, {"start_timeout_s": 0.5}, r"rollout.start_timeout_s=0.5 s"),
        (TransformersEngine, {"engine_args": {"block_size": 32}}, "use one of: attn_implementation, max_batch_size"),
        (TransformersEngine, {"tensor": 2}, "rollout.tensor=2"),
    ],
)
def test_rejected_starts(
    models: list[Path], tmp_path: Path, kind: type[RolloutEngine], rollout: dict[str, Any], message: str
) -> None:
    before = process_ids()
    with pytest.raises(EngineError, match=message):
        asyncio.run(kind(run_config(models[0], tmp_path, **rollout), 0).start())
    assert process_ids() <= before


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine, TransformersEngine])
def test_missing_checkpoint(tmp_path: Path, models: list[Path], kind: type[RolloutEngine]) -> None:
    with pytest.raises(ConfigError, match=r"no config.json"):
        kind(run_config(tmp_path, tmp_path), 0)
    (tmp_path / "config.json").write_text((models[0] / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"no \*.safetensors"):
        kind(run_config(tmp_path, tmp_path), 0)


def test_request_timeout(models: list[Path], tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = TransformersEngine(run_config(models[0], tmp_path, request_timeout_s=3), 0)
        await engine.start()
        await engine.pause("keep")
        with pytest.raises(EngineError, match=r"request slow took longer than rollout.request_timeout_s=3 s"):
            await engine.generate(GenerationRequest("slow", PromptInput([3, 4]), LONG))
        await engine.resume()
        assert (await engine.health()).running_requests == 0
        assert await engine.generate(GenerationRequest("quick", PromptInput([3, 4]), SamplingParams(max_new_tokens=1)))
        await engine.stop()

    asyncio.run(scenario())


def test_vllms_arguments_are_read_from_its_source() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert _vllm_arguments() == {field.name for field in dataclasses.fields(AsyncEngineArgs)}
