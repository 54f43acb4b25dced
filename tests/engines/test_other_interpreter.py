"""Engines in another interpreter: a virtual environment that has only the light part of this distribution, and what the
engine needs."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from slime_like.errors import EngineError, WeightSyncError
from slime_like.hosting.hosted_engine import HostedEngine
from slime_like.interfaces import BucketMetadata, Generation
from slime_like.system.processes import new_children, process_ids
from tests.engines.harness import EngineUnderTest, Reference, check_logprobs, run_config, started
from tests.support.interpreter import make_interpreter


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_interpreter(tmp_path_factory.mktemp("other") / "venv")


def generate(under_test: EngineUnderTest, reference: Reference, prompt: list[int]) -> Generation:
    (generation,) = under_test.generate(prompt, max_new_tokens=12, seed=3)
    check_logprobs(reference, prompt, generation)
    return generation


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.acceptance), "sglang"])
def test_an_engine_in_another_interpreter_is_the_same_engine(
    kind: str, other: Path, models: list[Path], references: list[Reference], tmp_path: Path
) -> None:
    """Sampling, updates, refusals, an update that fails, abort, and an end that leaves nothing; a death is reported."""
    before = process_ids()
    engine = HostedEngine(run_config(models[0], tmp_path, engine=kind, python=other), 3)
    with started(engine, references) as under_test:
        pids = new_children(before)
        host = next(
            psutil.Process(pid) for pid in pids if "slime_like.hosting.main" in " ".join(psutil.Process(pid).cmdline())
        )
        assert host.cmdline()[0] == str(other)
        assert not any("ray" in Path(row.path).parts for row in host.memory_maps())
        health = under_test.run(engine.health())
        assert health.alive and host.pid in health.process_ids
        assert (generate(under_test, references[0], [3, 4, 5]).weight_versions == 0).all()
        receipt, sent = under_test.run(under_test.load(1))
        assert receipt.version == 1 and receipt.checksums == sent == under_test.run(engine.checksums())
        assert (generate(under_test, references[1], [3, 4, 5]).weight_versions == 1).all()
        with pytest.raises(EngineError, match="the prompt is empty"):
            under_test.generate([])
        under_test.run(_failed_update(under_test))
        with pytest.raises(EngineError, match="mixed weights"):
            generate(under_test, references[1], [3])
        under_test.run(under_test.load(0))
        assert under_test.run(_aborted(under_test)).finish_reason == "abort"
        if kind == "transformers":
            under_test.run(_killed(under_test, host.pid, rf"engine 3 \(transformers in {other}\) died"))
    assert pids and not any(psutil.pid_exists(pid) for pid in pids)
    assert new_children(before) == []


async def _failed_update(under_test: EngineUnderTest) -> None:
    def tamper(bucket: BucketMetadata) -> None:
        entry = bucket.entries[0]
        object.__setattr__(entry, "checksum", entry.checksum ^ 1)

    await under_test.engine.begin_update(7)
    with pytest.raises(WeightSyncError):  # its class has survived the way
        await under_test.send(list(under_test.reference.weights.items()), tamper=tamper)


async def _aborted(under_test: EngineUnderTest) -> Generation:
    request = under_test.request([5, 6], max_new_tokens=700, temperature=0.05, stop_token_ids=(263,))
    task = asyncio.create_task(under_test.engine.generate(request))
    await asyncio.sleep(0.1)
    await under_test.engine.abort(request.request_id)
    return (await task)[0]


async def _killed(under_test: EngineUnderTest, host: int, message: str) -> None:
    await under_test.engine.pause("wait")
    os.kill(host, signal.SIGKILL)
    with pytest.raises(EngineError, match=message):
        await under_test.engine.resume()
    assert not (await under_test.engine.health()).alive
    await under_test.engine.stop()
    with pytest.raises(EngineError, match="not running"):
        await under_test.engine.resume()


def test_an_engine_that_cannot_start_there_says_why(other: Path, models: list[Path], tmp_path: Path) -> None:
    before = process_ids()
    config = run_config(models[0], tmp_path, engine="transformers", python=other, engine_args={"wings": 2})
    engine = HostedEngine(config, 0)
    with pytest.raises(EngineError, match=r"rollout.engine_args.wings is not an argument of transformers"):
        asyncio.run(engine.start())
    assert new_children(before) == []
