"""Starting, dying, and ending without a trace. That a stop ends everything is shown by every engine under test."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout.sglang.engine import SglangEngine
from rollout.transformers.engine import TransformersEngine
from rollout.vllm.engine import VllmEngine
from slime_like.errors import CheckpointError, ConfigError, EngineError
from slime_like.interfaces import GenerationRequest, RolloutEngine, SamplingParams
from slime_like.system.processes import mapped_files, new_children, process_ids
from slime_like.weights.transports.leftovers import SHARED_MEMORY
from tests.engines.harness import run_config

LONG = SamplingParams(max_new_tokens=700, temperature=0.05, stop_token_ids=(263,))


async def started(engine: RolloutEngine) -> list[int]:
    """Start it and let it sample; its processes. Called in the process that owns it."""
    before = process_ids()
    await engine.start()
    own = (await engine.health()).process_ids
    assert own and set(own) <= set(new_children(before))
    assert files_of_sglang(own) == set()
    assert (await engine.generate(GenerationRequest("first", [3, 4], SamplingParams(max_new_tokens=2))))[0]
    return [*own]


def files_of_sglang(process_ids: Iterable[int]) -> set[Path]:
    """What has a name outside the run directory: a process that is killed could not remove it."""
    shared = set(mapped_files(process_ids, "/dev/shm/sglang_"))
    commands = [psutil.Process(pid).cmdline() for pid in process_ids]
    scratch = {Path(command[-1]) for command in commands if "rollout.sglang.main" in command}
    return {path for path in shared | scratch if path.exists()}


OWNER = """
import asyncio, sys
from pathlib import Path
from slime_like.interfaces import load_engine
from tests.engines.harness import run_config
from tests.engines.test_lifecycle import started

async def main():
    config = run_config(Path(sys.argv[1]), Path(sys.argv[2]), tensor=int(sys.argv[4]))
    engine = load_engine(sys.argv[3])(config, 0)
    print("pids", *await started(engine), flush=True)
    await asyncio.sleep(300)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize(("kind", "ranks"), [("vllm", 2), ("sglang", 1)])
def test_it_ends_with_the_process_that_owns_it(models: list[Path], tmp_path: Path, kind: str, ranks: int) -> None:
    """Even if that is killed outright and can clean up nothing, with its children and all of its process group, as Ray
    does it."""
    script, log = tmp_path / "owner.py", tmp_path / "owner.log"
    script.write_text(OWNER)
    root = Path(__file__).parents[2]
    with log.open("w") as errors:
        owner = subprocess.Popen(
            [sys.executable, script, models[0], tmp_path, kind, str(ranks)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
            process_group=0,
        )
    try:
        assert owner.stdout is not None
        line = next((line for line in owner.stdout if line.startswith("pids")), "")
        pids = [int(word) for word in line.split()[1:]]
        assert pids, log.read_text()
        assert files_of_sglang(pids) == set()
        shared = set(mapped_files([owner.pid, *pids], f"{SHARED_MEMORY}/")) & set(SHARED_MEMORY.iterdir())
        assert shared or kind == "sglang"  # which leaves none in any case
    finally:
        children = psutil.Process(owner.pid).children()
        os.killpg(owner.pid, signal.SIGKILL)
        for child in children:
            child.kill()
        owner.wait()
    deadline = time.monotonic() + 60
    while (any(map(psutil.pid_exists, pids)) or any(file.exists() for file in shared)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, pids))
    assert [file for file in shared if file.exists()] == []


@pytest.mark.parametrize(
    ("kind", "rollout", "message"),
    [
        (VllmEngine, {"engine_args": {"no_such_argument": 1}}, "no_such_argument: vLLM has no such argument"),
        (VllmEngine, {"engine_args": {"dtype": "float16"}}, "set model.dtype instead"),
        (VllmEngine, {"engine_args": {"logprobs_mode": "raw_logprobs"}}, "logprobs_mode is refused"),
        (VllmEngine, {"start_timeout_s": 0.5}, r"rollout.start_timeout_s=0.5 s"),
        (VllmEngine, {"max_model_len": 4000}, r"did not start: ValidationError: (?!.*pydantic\.dev).*max_model_len"),
        (SglangEngine, {"engine_args": {"no_such_argument": 1}}, "no_such_argument: SGLang has no such argument"),
        (SglangEngine, {"engine_args": {"context_length": 64}}, "set rollout.max_model_len instead"),
        (SglangEngine, {"engine_args": {"enable_lora": True}}, "enable_lora is refused"),
        (SglangEngine, {"start_timeout_s": 0.5}, r"rollout.start_timeout_s=0.5 s"),
        (SglangEngine, {"max_model_len": 4000}, "max_position_embeddings=1024"),
        (SglangEngine, {"engine_args": {"max_total_tokens": 1}}, "did not start: AssertionError: .*is zero"),
        (TransformersEngine, {"engine_args": {"block_size": 32}}, "it knows attn_implementation, max_batch_size"),
        (TransformersEngine, {"tensor": 2}, "rollout.tensor=2"),
    ],
)
def test_a_start_that_cannot_succeed(
    models: list[Path], tmp_path: Path, kind: type[RolloutEngine], rollout: dict[str, Any], message: str
) -> None:
    before = process_ids()
    with pytest.raises(EngineError, match=message):
        asyncio.run(kind(run_config(models[0], tmp_path, **rollout), 0).start())
    assert new_children(before) == []


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine, TransformersEngine])
def test_a_checkpoint_that_is_none(tmp_path: Path, models: list[Path], kind: type[RolloutEngine]) -> None:
    with pytest.raises(ConfigError, match=r"no config.json"):
        kind(run_config(tmp_path, tmp_path), 0)
    (tmp_path / "config.json").write_text((models[0] / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"no \*.safetensors"):
        kind(run_config(tmp_path, tmp_path), 0)


def test_a_request_takes_no_longer_than_allowed(models: list[Path], tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = TransformersEngine(run_config(models[0], tmp_path, request_timeout_s=3), 0)
        await engine.start()
        await engine.pause("keep")
        with pytest.raises(EngineError, match=r"request slow took longer than rollout.request_timeout_s=3 s"):
            await engine.generate(GenerationRequest("slow", [3, 4], LONG))
        await engine.resume()
        assert (await engine.health()).running_requests == 0
        assert await engine.generate(GenerationRequest("quick", [3, 4], SamplingParams(max_new_tokens=1)))
        await engine.stop()

    asyncio.run(scenario())
