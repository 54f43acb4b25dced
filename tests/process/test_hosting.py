"""A process that serves an engine, and calls of Ray's GCS."""

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from slime_like import errors
from slime_like.checks.check import check
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError, EngineError, SlimeLikeError, WeightSyncError
from slime_like.hosting.process import ChildProcess, ProcessEnded, portable
from slime_like.interfaces import GenerationRequest, PromptInput, SamplingParams
from slime_like.orchestration.cluster import gcs
from slime_like.orchestration.cluster.gcs import Gcs, Member, UnreachableError, WrongTokenError
from slime_like.orchestration.cluster.ray_node import ray_environment
from tests.unit.checks.checkpoint import sound_flags
from tests.unit.launch.gcs_server import HOST, TOKEN, gcs_server

FIELDS = {
    "code": "damaged",
    "who": "engine 3",
    "phase": "update",
    "remedy": "send it again",
    "users_traceback": "line 1",
}

MODULE = f"""
import asyncio, os, sys
from multiprocessing.connection import Connection
from pathlib import Path
from slime_like.errors import ConfigError, EngineError, WeightSyncError
from slime_like.hosting.process import Owner

class Custom(EngineError): ...

class Host:
    aborted = []

    async def fail(self, kind):
        raise {{"sync": WeightSyncError, "custom": Custom}}[kind]("tensor w arrived damaged", **{FIELDS!r})

    async def configuration(self):
        raise ConfigError(["a=1: too small", "b=2: too large"])

    async def foreign(self):
        raise LookupError("no such\\n thing")

    async def generate(self, request):
        await asyncio.sleep(1000)

    async def abort(self, request_id):
        self.aborted.append(request_id)

    async def so_far(self):
        return self.aborted

    async def die(self):
        os._exit(3)

async def main():
    owner = Owner(Connection(int(sys.argv[1])), Path(sys.argv[2]))
    with owner.starting():
        pass
    await owner.serve(Host())

asyncio.run(main())
"""


_CODE = "rollout.engine-installed"


def fields(error: SlimeLikeError) -> dict[str, str | None]:
    return {name: getattr(error, name) for name in FIELDS}


def test_errors_are_carried_abandoned_requests_aborted_and_calls_ended_by_a_death(
    user_module: Callable[[str, str], Path],
) -> None:
    """Errors keep class and fields."""
    user_module("a_host", MODULE)

    async def scenario(process: ChildProcess) -> None:
        await process.start()
        with pytest.raises(WeightSyncError) as sync:
            await process.call("fail", "sync")
        assert fields(sync.value) == FIELDS
        assert str(sync.value) == "engine 3, update: tensor w arrived damaged; send it again"
        with pytest.raises(EngineError) as custom:  # this process may not have its class
            await process.call("fail", "custom")
        assert type(custom.value) is EngineError and fields(custom.value) == FIELDS
        for method, code, text in (
            ("configuration", "config", "a=1: too small\nb=2: too large"),
            ("foreign", "unexpected", "LookupError: no such thing"),
        ):
            with pytest.raises(EngineError) as other:
                await process.call(method)
            assert (other.value.code, str(other.value)) == (code, text)
        request = GenerationRequest("r7", PromptInput([1]), SamplingParams())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.generate(request), 0.1)
        assert await process.call("so_far") == ["r7"]
        waiting = asyncio.ensure_future(process.generate(request))
        for method in ("die", "so_far"):
            with pytest.raises(ProcessEnded):
                await process.call(method)
        with pytest.raises(ProcessEnded):
            await waiting
        assert not process.alive

    async def bounded() -> None:
        process = ChildProcess("a_host", lambda scratch: dict(os.environ))
        try:
            await asyncio.wait_for(scenario(process), 60)
        finally:
            process.end(5.0)
        assert not any(map(psutil.pid_exists, process.process_ids))

    asyncio.run(bounded())


@pytest.mark.parametrize(("python", "codes"), [("/none", [_CODE]), ("/bin/true", [_CODE]), (sys.executable, [])])
def test_an_interpreter_that_cannot_run_engines_is_rejected(tmp_path: Path, python: str, codes: list[str]) -> None:
    problems = check(load_config(None, [*sound_flags(tmp_path), "--rollout.python", python]))
    assert [problem.code for problem in problems] == codes


_KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SlimeLikeError)]


@pytest.mark.parametrize("kind", _KINDS)
def test_every_error_of_the_package_is_portable(kind: type[SlimeLikeError]) -> None:
    error = kind(["it fails"]) if kind is ConfigError else kind("it fails", **FIELDS)  # type: ignore[arg-type]
    carried = portable(error)
    assert type(carried) is (EngineError if kind is ConfigError else kind)
    assert fields(carried) == fields(error) and str(carried) == str(error)


def test_values_are_stored_once_and_members_are_listed_with_the_token() -> None:
    with gcs_server() as (server, port):
        with pytest.raises(WrongTokenError):
            Gcs(f"{HOST}:{port}", "w" * 32, silence_s=5).put_new("verdict", {})
        assert server.values == {}
        found = Gcs(f"{HOST}:{port}", TOKEN, silence_s=5)
        assert found.get("problem") is None
        assert found.put_new("problem", {"code": 1}) and not found.put_new("problem", {"code": 2})
        assert found.get("problem") == {"code": 1}
        for rank in (0, 2):
            server.join(rank)
        server.leave(2, "health check failed")
        server.nodes[3] = GcsNodeInfo(node_manager_hostname="started by hand")
        assert found.members() == {
            0: Member("node 0 (gpu-0, 10.0.0.0)", True, "it left"),
            2: Member("node 2 (gpu-2, 10.0.0.2)", False, "health check failed"),
        }


@pytest.mark.parametrize(("listens", "refused", "bound_s"), [(False, True, 0.5), (True, False, 1.5)])
def test_a_gcs_that_does_not_answer_is_given_up(
    listens: bool, refused: bool, bound_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up earlier if nothing listens, since its process has ended."""
    for name, seconds in (("_CALL_S", 0.2), ("_REFUSED_S", 0.2)):
        monkeypatch.setattr(gcs, name, seconds)
    with socket.socket() as holder:
        holder.bind((HOST, 0))
        if listens:
            holder.listen()
        began = time.monotonic()
        with pytest.raises(UnreachableError) as error:
            Gcs(f"{HOST}:{holder.getsockname()[1]}", TOKEN, silence_s=0.8).get("verdict")
    assert error.value.refused == refused
    assert time.monotonic() - began < bound_s


@pytest.mark.parametrize("silence_s", [6.0, 12.0, 30.0])
def test_rays_health_checks_fail_within_the_bound_on_silence(silence_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:1")
    given = ray_environment(Path("/k"), silence_s)
    period, timeout, checks = (
        int(given[f"RAY_health_check_{name}"]) for name in ("period_ms", "timeout_ms", "failure_threshold")
    )
    assert timeout >= 1000 and silence_s * 900 <= checks * (period + timeout) <= silence_s * 1000
    keepalives = [int(given[f"RAY_grpc_client_keepalive_{name}_ms"]) for name in ("time", "timeout")]
    assert 0 < sum(keepalives) < silence_s * 1000
    assert given["RAY_AUTH_MODE"] == "token" and given["RAY_AUTH_TOKEN_PATH"] == "/k" and "RAY_ADDRESS" not in given
