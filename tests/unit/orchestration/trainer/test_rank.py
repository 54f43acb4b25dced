"""A rank's port, CUDA environment, and share of the node's cores."""

import socket
from pathlib import Path
from typing import Any

import pytest

from backends.common.process.rendezvous import share_of_cores
from slime_like.config import RunConfig
from slime_like.errors import TrainerError
from slime_like.interfaces import RankPlacement
from slime_like.orchestration.trainer import rank
from slime_like.orchestration.trainer.rank import cuda_environment
from tests.support.rejections import Rejects

ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@pytest.mark.parametrize(
    ("backend", "tensor", "capability", "expected"),
    [
        ("megatron", 2, (9, 0), ONE_QUEUE),
        ("megatron", 2, (8, 0), ONE_QUEUE),
        ("megatron", 2, None, ONE_QUEUE),  # unknown
        ("megatron", 2, (10, 0), {}),
        ("megatron", 2, (12, 0), {}),
        ("megatron", 1, (9, 0), {}),
        ("fsdp", 1, (9, 0), {}),
    ],
)
def test_only_tensor_parallel_megatron_has_one_hardware_queue(
    backend: str, tensor: int, capability: tuple[int, int] | None, expected: dict[str, str]
) -> None:
    trainer: Any = {"backend": backend, "parallel": {"tensor": tensor}}
    config = RunConfig(run_dir=Path("run"), model={"path": "model"}, trainer=trainer)
    assert cuda_environment(config.trainer, capability) == expected


@pytest.mark.parametrize(("on_node", "cores", "expected"), [(8, 96, 12), (None, 96, 3), (8, 4, 1), (1, 96, 96)])
def test_ranks_share_the_cores_of_their_node(on_node: int | None, cores: int, expected: int) -> None:
    """There are 32 ranks."""
    assert share_of_cores(RankPlacement(9, 32, 0, "10.0.0.1", 21_000, on_node), cores) == expected


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch, rejects: Rejects) -> None:
    monkeypatch.setattr(rank, "use_log", lambda _: None)
    monkeypatch.setattr(rank, "node_address", lambda: "127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        trainer: Any = {"rendezvous_port": port}
        actor = rank.TrainerRank(RunConfig(run_dir=Path("run"), model={"path": "model"}, trainer=trainer), "trainer-0")
        with rejects(TrainerError, "port-taken"):
            actor.address()
    assert actor.address() == ("127.0.0.1", port)
