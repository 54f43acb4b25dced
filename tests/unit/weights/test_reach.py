"""The transport that ``auto`` selects, rejection of transports out of reach, and pairing of workers with ranks."""

import socket
from contextlib import nullcontext
from importlib.metadata import version

import pytest

from slime_like.checks.engines import engine_libraries
from slime_like.config import RunConfig
from slime_like.errors import ConfigError, WeightSyncError
from slime_like.weights.transports.colocated import DevicePlace, rank_on
from slime_like.weights.transports.names import Libraries
from slime_like.weights.transports.registry import transport_of, use_delta
from tests.support.rejections import Rejects

ANYWHERE = {"gloo", "directory"}
HERE = {"shared_memory", *ANYWHERE}
# on GPUs, hosts, engines on the trainers' devices; the choice of auto; transports that connect all
SITUATIONS: list[tuple[bool, int, int | None, str, set[str]]] = [
    (False, 1, None, "shared_memory", HERE),
    (False, 1, 1, "shared_memory", {"colocated", *HERE}),
    (False, 2, 2, "gloo", {"colocated", *ANYWHERE}),
    (False, 2, None, "gloo", ANYWHERE),
    (True, 1, None, "nccl", {"nccl", *HERE}),
    (True, 4, None, "nccl", {"nccl", *ANYWHERE}),
    (True, 1, 1, "colocated", {"colocated", *HERE}),
    (True, 1, 2, "colocated", {"colocated", *HERE}),
    (True, 2, 2, "colocated", {"colocated", *ANYWHERE}),
]


HERE_AND_THERE = Libraries("2.13.0", "2.29.7")


def choose(
    name: str,
    colocated: int | None,
    on_cuda: bool = True,
    num_hosts: int = 1,
    engines: Libraries = HERE_AND_THERE,
    **sync: str,
) -> str:
    sync |= {"transport": name} | ({"directory": "unused"} if name == "directory" else {})
    raw = {"run_dir": "unused", "model": {"path": "unused"}, "sync": sync}
    raw |= {"rollout": {"num_engines": colocated or 1}}
    raw |= {"cluster": {"placement": "separate" if colocated is None else "colocated"}}
    config = RunConfig.model_validate(raw)
    return transport_of(config.sync, config.cluster, on_cuda, num_hosts, HERE_AND_THERE, engines)


@pytest.mark.parametrize(("on_cuda", "num_hosts", "colocated", "auto", "reaching"), SITUATIONS)
def test_choice_of_transport(
    on_cuda: bool, num_hosts: int, colocated: int | None, auto: str, reaching: set[str], rejects: Rejects
) -> None:
    assert choose("auto", colocated, on_cuda, num_hosts) == auto
    excluded = {"colocated"} if colocated is None else {"nccl"}  # by the configuration itself
    for name in {"colocated", "directory", "gloo", "nccl", "shared_memory"} - excluded:
        with nullcontext() if name in reaching else rejects(ConfigError, "out-of-reach"):
            assert choose(name, colocated, on_cuda, num_hosts) == name


@pytest.mark.parametrize(
    ("engines", "colocated", "auto"),
    [
        (Libraries("2.14.1", "2.30.7"), None, "shared_memory"),
        (Libraries("2.13.0+cu126", "2.29.7"), None, "nccl"),
        (Libraries("2.14.1"), None, "shared_memory"),
        (Libraries("2.13.0"), None, "nccl"),
        (Libraries("2.14.1", "2.30.7"), 1, "shared_memory"),
        (Libraries("2.13.0", "2.30.7"), 1, "colocated"),
    ],
)
def test_engines_of_another_environment(engines: Libraries, colocated: int | None, auto: str, rejects: Rejects) -> None:
    """NCCL needs the same NCCL version, and shared GPU memory the same torch version."""
    assert choose("auto", colocated, engines=engines) == auto
    if auto == "shared_memory":
        with rejects(ConfigError, "out-of-reach"):
            choose("nccl" if colocated is None else "colocated", colocated, engines=engines)


def test_libraries_and_delta_of_an_environment() -> None:
    found = Libraries.of({"torch": "2.13.0", "nvidia-nccl-cu13": "2.29.7", "vllm": "0.32.0"})
    assert found == HERE_AND_THERE and str(found) == "torch 2.13.0 with NCCL 2.29.7"
    assert engine_libraries(None).torch == version("torch")
    for on_cuda in (True, False):
        assert choose("auto", 1, on_cuda, delta="always") == "shared_memory"


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
def test_use_delta(setting: str, transport: str, dtype: str, expected: bool) -> None:
    assert use_delta(setting, transport, dtype) is expected


# -------------------------------------------------------------------------------- engine workers and trainer ranks
def gpus(nodes: int, per_node: int = 8) -> list[DevicePlace]:
    return [DevicePlace(f"node-{node}", f"GPU-{node}-{index}") for node in range(nodes) for index in range(per_node)]


def test_ranks_and_workers_are_paired(rejects: Rejects) -> None:
    assert [rank_on(own, gpus(1)) for own in gpus(1)[5:7]] == [5, 6]
    ranks = gpus(2, 2)
    for several, own in ((ranks, DevicePlace("node-0", "GPU-1-0")), ([*ranks, ranks[1]], ranks[1]), ([], ranks[0])):
        with rejects(WeightSyncError, "unpaired"):
            rank_on(own, several)


@pytest.mark.parametrize("slot", [0, 6])
def test_cpu_slot(slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert DevicePlace.of_this_process(slot) == DevicePlace(socket.gethostname(), f"CPU slot {slot}")
