"""Requests without the key. Run on a host as ``stranger.py ADDRESS PORT...``; prints the answers of each port as JSON.

Each port is asked like every kind of Ray's servers and like an HTTP server. If an answer begins with OK, the server has
served a stranger.
"""

import http.client
import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc

WRONG = "not-the-key-of-this-cluster-not-the-key"
# One method of each of Ray's services; an empty message is a valid request of any of them.
METHODS = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "NodeManagerService/GetNodeStats",
    "ObjectManagerService/Pull",
    "CoreWorkerService/NumPendingTasks",
)


def ask(address: str, port: int, timeout_s: float = 3.0) -> list[str]:
    try:
        socket.create_connection((address, port), 5).close()
    except OSError as error:
        return [type(error).__name__]
    answers = {grpc_answer(address, port, method, token, timeout_s) for method in METHODS for token in ("", WRONG)}
    return sorted(answers | {http_answer(address, port, timeout_s)})


def grpc_answer(address: str, port: int, method: str, token: str, timeout_s: float) -> str:
    with grpc.insecure_channel(f"{address}:{port}") as channel:
        metadata = [("authorization", f"Bearer {token}")] if token else []
        try:
            channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            return str(error.code().name)  # type: ignore[attr-defined]
    return f"OK {method}"


def http_answer(address: str, port: int, timeout_s: float) -> str:
    connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
    try:
        connection.request("POST", "/get_or_create_runtime_env", body=b"")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return "no HTTP"
    finally:
        connection.close()
    return f"OK {status}" if status < 400 else f"HTTP {status}"


if __name__ == "__main__":
    ports = sys.argv[2:]
    with ThreadPoolExecutor(32) as pool:  # most of the time is spent on servers that never answer
        answers = list(pool.map(lambda port: ask(sys.argv[1], int(port)), ports))
    print(json.dumps(dict(zip(ports, answers, strict=True))))
