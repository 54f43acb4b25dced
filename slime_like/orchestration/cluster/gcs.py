"""Client of Ray's GCS for the nodes of a launch: membership, health, and a few small values.

Ray's own clients try for a minute and then end the process, or raise errors that do not name the node. These calls of
its gRPC services each have a bound, and raise the reason why they failed.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # otherwise each lost connection prints a line

# Ray's public clients need a Ray node on this machine, have no bound, and end the process when the GCS is gone.
import grpc  # type: ignore[import-untyped]
from ray.core.generated import gcs_service_pb2 as messages
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.core.generated.gcs_service_pb2_grpc import InternalKVGcsServiceStub, NodeInfoGcsServiceStub

from slime_like.errors import LaunchError
from slime_like.orchestration.cluster.bundles import RANK_LABEL
from slime_like.system.interrupts import raise_if_interrupted

_CALL_S = 2.0
_REFUSED_S = 2.0
_POLL_S = 0.2
_NAMESPACE = b"slime-like-launch"


class UnreachableError(LaunchError):
    """The GCS does not answer.

    Attributes:
        refused: nothing listens there.
    """

    code = "gcs-unreachable"

    def __init__(self, why: str) -> None:
        self.refused = why == "Connection refused"
        super().__init__(why)


class WrongTokenError(LaunchError):
    """The GCS does not accept this node's token."""

    code = "wrong-token"


@dataclass(frozen=True, slots=True)
class Member:
    """A node of Ray that a launch started.

    Attributes:
        alive: Ray's health checks succeed, and it has not left.
        end: why it is not alive.
    """

    name: str
    alive: bool
    end: str


class Gcs:
    """Client of the GCS at ADDRESS:PORT; tries each call for ``silence_s`` seconds, or less if nothing listens."""

    def __init__(self, address: str, token: str, silence_s: float) -> None:
        channel = grpc.insecure_channel(address, options=[("grpc.max_reconnect_backoff_ms", 1000)])
        self._values = InternalKVGcsServiceStub(channel)
        self._nodes = NodeInfoGcsServiceStub(channel)
        self._token = [("authorization", f"Bearer {token}")]
        self._silence_s = silence_s

    def get(self, key: str) -> Any:
        """Return a value, or ``None`` if there is none."""
        request = messages.InternalKVGetRequest(namespace=_NAMESPACE, key=key.encode())
        value = self._call(self._values.InternalKVGet, request).value
        return json.loads(value) if value else None

    def put_new(self, key: str, value: Any) -> bool:
        """Store a value unless there is one already; return whether it was stored."""
        request = messages.InternalKVPutRequest(
            namespace=_NAMESPACE, key=key.encode(), value=json.dumps(value).encode(), overwrite=False
        )
        return bool(self._call(self._values.InternalKVPut, request).added)

    def members(self) -> dict[int, Member]:
        found = self._call(self._nodes.GetAllNodeInfo, messages.GetAllNodeInfoRequest()).node_info_list
        members = {}
        for node in filter(lambda node: RANK_LABEL in node.labels, found):
            name = f"node {node.labels[RANK_LABEL]} ({node.node_manager_hostname}, {node.node_manager_address})"
            end = node.death_info.reason_message or "it left"
            members[int(node.labels[RANK_LABEL])] = Member(name, node.state == GcsNodeInfo.ALIVE, end)
        return members

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        """Call the GCS. Raises ``UnreachableError`` (no answer in time) or ``WrongTokenError`` (token rejected)."""
        began = time.monotonic()
        while True:
            try:
                return method(request, timeout=_CALL_S, metadata=self._token)
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                    raise WrongTokenError("Ray does not accept the cluster's key") from error
                silent_s = time.monotonic() - began
                why = f"no answer within {silent_s:.0f} s"
                if error.code() == grpc.StatusCode.UNAVAILABLE:  # "...; last error: ...: Connection refused"
                    why = (error.details() or "").rpartition(": ")[2]
                unreachable = UnreachableError(why)
                if silent_s >= (min(_REFUSED_S, self._silence_s) if unreachable.refused else self._silence_s):
                    raise unreachable from error
            raise_if_interrupted()
            time.sleep(_POLL_S)
