"""Which transport ``auto`` is, and which are rejected where they do not reach."""

import pytest

from slime_like.errors import WeightSyncError
from slime_like.weights.transports.reach import Situation, choose_transport, use_delta

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
    ("name", "situation", "message"),
    [
        ("shared_memory", CPU_HOSTS, "reaches one host, but trainers and engines lie on 2; use gloo"),
        ("cuda_ipc", CUDA_SHARED_HOSTS, "reaches one host"),
        ("nccl", CPU, "needs GPUs, and there are none; use shared_memory"),
        ("cuda_ipc", CPU, "needs GPUs"),
        ("nccl", CUDA_SHARED, "needs its own device"),
        ("cuda_ipc", CUDA, "needs engines on the trainers' own devices"),
        ("cuda_ipc", CUDA_SHARED_APART, "rollout.tensor is the number of trainer ranks"),
        ("pigeon", CPU, "is unknown; use auto or one of"),
    ],
)
def test_what_does_not_reach(name: str, situation: Situation, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        choose_transport(name, situation)


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
