"""Which transport ``auto`` is, and which are rejected where they do not reach."""

import pytest

from slime_like.errors import WeightSyncError
from slime_like.weights.transports.reach import Situation, choose_transport, use_delta
from tests.support.rejections import Rejects

CPU = Situation(on_cuda=False, num_hosts=1, shared_devices=False, devices_are_visible=False)
CPU_HOSTS = Situation(on_cuda=False, num_hosts=2, shared_devices=False, devices_are_visible=False)
CPU_SHARED = Situation(on_cuda=False, num_hosts=1, shared_devices=True, devices_are_visible=True)
CUDA = Situation(on_cuda=True, num_hosts=1, shared_devices=False, devices_are_visible=False)
CUDA_HOSTS = Situation(on_cuda=True, num_hosts=4, shared_devices=False, devices_are_visible=False)
CUDA_SHARED = Situation(on_cuda=True, num_hosts=1, shared_devices=True, devices_are_visible=True)
CUDA_SHARED_APART = Situation(on_cuda=True, num_hosts=1, shared_devices=True, devices_are_visible=False)
CUDA_SHARED_HOSTS = Situation(on_cuda=True, num_hosts=2, shared_devices=True, devices_are_visible=False)


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        (CPU, "shared_memory"),
        (CPU_SHARED, "shared_memory"),
        (CPU_HOSTS, "gloo"),
        (CUDA, "nccl"),
        (CUDA_HOSTS, "nccl"),
        (CUDA_SHARED, "cuda_ipc"),
        (CUDA_SHARED_APART, "shared_memory"),
        (CUDA_SHARED_HOSTS, "gloo"),
    ],
)
def test_auto(situation: Situation, expected: str) -> None:
    assert choose_transport("auto", situation) == expected
    assert choose_transport(expected, situation) == expected  # what auto chooses is never refused


@pytest.mark.parametrize(
    ("name", "situation"),
    [
        ("shared_memory", CPU_HOSTS),
        ("cuda_ipc", CUDA_SHARED_HOSTS),
        ("nccl", CPU),
        ("cuda_ipc", CPU),
        ("nccl", CUDA_SHARED),
        ("cuda_ipc", CUDA),
        ("cuda_ipc", CUDA_SHARED_APART),
    ],
)
def test_what_does_not_reach(name: str, situation: Situation, rejects: Rejects) -> None:
    with rejects(WeightSyncError, "out-of-reach"):
        choose_transport(name, situation)


def test_an_unknown_transport(rejects: Rejects) -> None:
    with rejects(WeightSyncError, "unknown-transport"):
        choose_transport("pigeon", CPU)


@pytest.mark.parametrize("name", ["gloo", "directory", "shared_memory"])
def test_what_reaches_anywhere_may_be_asked_for(name: str) -> None:
    assert choose_transport(name, CUDA) == name


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
