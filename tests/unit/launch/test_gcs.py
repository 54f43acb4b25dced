"""Calls of Ray's GCS: bounded, with the token, and with the reason where they fail."""

from __future__ import annotations

import socket
import time

import pytest

from slime_like.orchestration.cluster.gcs import Gcs, Member, UnreachableError, WrongTokenError
from tests.unit.launch.gcs_server import HOST, TOKEN, gcs_server


def test_a_value_is_stored_once() -> None:
    with gcs_server() as (_, port):
        gcs = Gcs(f"{HOST}:{port}", TOKEN, silence_s=5)
        assert gcs.get("problem") is None
        assert gcs.put_new("problem", {"code": 1}) and not gcs.put_new("problem", {"code": 2})
        assert gcs.get("problem") == {"code": 1}


def test_members_are_listed_by_rank_with_their_end() -> None:
    with gcs_server() as (server, port):
        for rank in (0, 2):
            server.join(rank)
        server.leave(2, "health check failed")
        assert Gcs(f"{HOST}:{port}", TOKEN, silence_s=5).members() == {
            0: Member("node 0 (gpu-0, 10.0.0.0)", True, "it left"),
            2: Member("node 2 (gpu-2, 10.0.0.2)", False, "health check failed"),
        }


def test_another_token_is_refused() -> None:
    with gcs_server() as (server, port), pytest.raises(WrongTokenError):
        Gcs(f"{HOST}:{port}", "w" * 32, silence_s=5).put_new("verdict", {})
    assert server.values == {}


@pytest.mark.parametrize(("listens", "refused", "bound_s"), [(False, True, 4), (True, False, 6)])
def test_a_gcs_that_does_not_answer_is_given_up(listens: bool, refused: bool, bound_s: float) -> None:
    """At once where nothing listens: then its process has ended."""
    with socket.socket() as holder:
        holder.bind((HOST, 0))
        if listens:
            holder.listen()
        began = time.monotonic()
        with pytest.raises(UnreachableError) as error:
            Gcs(f"{HOST}:{holder.getsockname()[1]}", TOKEN, silence_s=3).get("verdict")
    assert error.value.refused == refused
    assert time.monotonic() - began < bound_s
