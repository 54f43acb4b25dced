"""Calls of Ray's GCS: the token, bounds, and reasons of failures."""

import socket
import time
from pathlib import Path

import pytest
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from slime_like.orchestration.cluster import gcs
from slime_like.orchestration.cluster.gcs import Gcs, Member, UnreachableError, WrongTokenError
from slime_like.orchestration.cluster.ray_node import ray_environment
from tests.unit.launch.gcs_server import HOST, TOKEN, gcs_server


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
