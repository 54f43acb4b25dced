"""gRPC server with the part of Ray's GCS that a launch calls: values, nodes and the token."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc  # type: ignore[import-untyped]
from ray.core.generated import gcs_service_pb2 as messages
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.core.generated.gcs_service_pb2_grpc import (
    InternalKVGcsServiceServicer,
    NodeInfoGcsServiceServicer,
    add_InternalKVGcsServiceServicer_to_server,
    add_NodeInfoGcsServiceServicer_to_server,
)

from slime_like.orchestration.cluster.bundles import RANK_LABEL

HOST = "127.0.0.2"
TOKEN = "k" * 32


class GcsServer(InternalKVGcsServiceServicer, NodeInfoGcsServiceServicer):  # type: ignore[misc]
    """Stored values by key, and nodes by rank."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.nodes: dict[int, GcsNodeInfo] = {}

    def join(self, rank: int) -> None:
        self.nodes[rank] = GcsNodeInfo(
            node_manager_hostname=f"gpu-{rank}",
            node_manager_address=f"10.0.0.{rank}",
            labels={RANK_LABEL: str(rank)},
            state=GcsNodeInfo.ALIVE,
        )

    def leave(self, rank: int, why: str = "") -> None:
        self.nodes[rank].state = GcsNodeInfo.DEAD
        self.nodes[rank].death_info.reason_message = why

    def InternalKVGet(self, request: Any, context: Any) -> Any:
        _require_token(context)
        return messages.InternalKVGetReply(value=self.values.get(request.key, b""))

    def InternalKVPut(self, request: Any, context: Any) -> Any:
        _require_token(context)
        added = request.key not in self.values
        self.values.setdefault(request.key, request.value)
        return messages.InternalKVPutReply(added=added)

    def GetAllNodeInfo(self, request: Any, context: Any) -> Any:
        _require_token(context)
        return messages.GetAllNodeInfoReply(node_info_list=list(self.nodes.values()))


def _require_token(context: Any) -> None:
    if ("authorization", f"Bearer {TOKEN}") not in context.invocation_metadata():
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")


@contextmanager
def gcs_server(port: int = 0) -> Iterator[tuple[GcsServer, int]]:
    """Yield the server and its port."""
    gcs = GcsServer()
    server = grpc.server(ThreadPoolExecutor(8))
    add_InternalKVGcsServiceServicer_to_server(gcs, server)
    add_NodeInfoGcsServiceServicer_to_server(gcs, server)
    bound = server.add_insecure_port(f"{HOST}:{port}")
    server.start()
    try:
        yield gcs, bound
    finally:
        server.stop(None).wait()
