"""Which transport ``auto`` is, and which are rejected where they do not reach."""

from contextlib import nullcontext

import pytest

from slime_like.errors import WeightSyncError
from slime_like.weights.transports.registry import Situation, choose_transport, use_delta
from tests.support.rejections import Rejects

ANYWHERE = {"gloo", "directory"}
HERE = {"shared_memory", *ANYWHERE}
# on_cuda, num_hosts, shared_devices, devices_are_visible; what auto is; what reaches
SITUATIONS: list[tuple[Situation, str, set[str]]] = [
    (Situation(False, 1, False, False), "shared_memory", HERE),
    (Situation(False, 1, True, True), "shared_memory", HERE),
    (Situation(False, 2, False, False), "gloo", ANYWHERE),
    (Situation(True, 1, False, False), "nccl", {"nccl", *HERE}),
    (Situation(True, 4, False, False), "nccl", {"nccl", *ANYWHERE}),
    (Situation(True, 1, True, True), "cuda_ipc", {"cuda_ipc", *HERE}),
    (Situation(True, 1, True, False), "shared_memory", HERE),
    (Situation(True, 2, True, False), "gloo", ANYWHERE),
]


@pytest.mark.parametrize(("situation", "auto", "reaching"), SITUATIONS)
def test_what_reaches(situation: Situation, auto: str, reaching: set[str], rejects: Rejects) -> None:
    assert choose_transport("auto", situation) == auto
    for name in ("cuda_ipc", "directory", "gloo", "nccl", "shared_memory"):
        with nullcontext() if name in reaching else rejects(WeightSyncError, "out-of-reach"):
            assert choose_transport(name, situation) == name


def test_an_unknown_transport(rejects: Rejects) -> None:
    with rejects(WeightSyncError, "unknown-transport"):
        choose_transport("pigeon", SITUATIONS[0][0])


@pytest.mark.parametrize(
    ("setting", "transport", "dtype", "expected"),
    [
        ("auto", "gloo", "bfloat16", True),
        ("auto", "directory", "float16", True),
        ("auto", "gloo", "float32", False),
        ("auto", "shared_memory", "bfloat16", False),
        ("auto", "nccl", "bfloat16", False),
        ("always", "shared_memory", "float32", True),
        ("never", "gloo", "bfloat16", False),
    ],
)
def test_where_changes_are_sent(setting: str, transport: str, dtype: str, expected: bool) -> None:
    assert use_delta(setting, transport, dtype) is expected
