"""The machine: GPUs, networks, whole files, processes, and texts of numbers."""

from pathlib import Path
from typing import Any

import psutil
import pytest
from ray._private.thirdparty import pynvml

from slime_like.system import gpus
from slime_like.system.disk import whole_file
from slime_like.system.gpus import compute_capability, local_gpus, stay_near
from slime_like.system.network import MOST_NODES, expand_node_list, is_credential, redact_url
from slime_like.system.processes import end_processes
from slime_like.system.words import memory_text, seconds_text, traffic_text

HANDLE = object()


def test_gpus_are_counted_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local_gpus(tmp_path) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,10")
    assert local_gpus(tmp_path) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local_gpus(tmp_path) == 0


def use_library(monkeypatch: pytest.MonkeyPatch, fails: str = "") -> None:
    """Replace NVML by a machine with GPU 3, which is GPU-7f, of compute capability 9.0, near cores 1, 3 and 70."""
    answers: dict[str, tuple[list[Any], Any]] = {
        "Init": ([()], None),
        "Shutdown": ([()], None),
        "DeviceGetHandleByIndex": ([(3,)], HANDLE),
        "DeviceGetHandleByUUID": ([("GPU-7f",)], HANDLE),
        "DeviceGetCudaComputeCapability": ([(HANDLE,)], (9, 0)),
        "DeviceGetCpuAffinity": ([(HANDLE, 64)], [0b1010, 1 << 6] + [0] * 62),
    }

    def call(name: str, *arguments: Any) -> Any:
        allowed, answer = answers[name]
        if name == fails or arguments not in allowed:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return answer

    for name in answers:
        monkeypatch.setattr(pynvml, f"nvml{name}", lambda *arguments, name=name: call(name, *arguments))


@pytest.mark.parametrize("device", ["3", "GPU-7f"])
def test_compute_capability(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_library(monkeypatch, "Init")
    assert compute_capability(device) is None  # without a driver
    use_library(monkeypatch)
    assert compute_capability(device) == (9, 0)


@pytest.mark.parametrize(
    ("allowed", "fails", "expected"),
    [
        (range(96), "", [{1, 3, 70}]),
        ({0, 1, 2, 70}, "", [{1, 70}]),  # limited by the user or a container
        ({0, 2}, "", []),
        (range(96), "DeviceGetCpuAffinity", []),
        (range(96), "DeviceGetHandleByUUID", []),
    ],
)
def test_a_process_stays_on_its_gpus_cores(
    allowed: Any, fails: str, expected: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[set[int]] = []
    use_library(monkeypatch, fails)
    monkeypatch.setattr(gpus.os, "sched_getaffinity", lambda pid: set(allowed))
    monkeypatch.setattr(gpus.os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    stay_near("GPU-7f")
    assert bound == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node", "node"),
        ("node1,node2", "node1 node2"),
        ("node[01-03,07],gpu-a[1-2]b", "node01 node02 node03 node07 gpu-a1b gpu-a2b"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[3,1,2]", "n3 n1 n2"),
        ("rack[1-2]node[01-02]", "rack1node01 rack1node02 rack2node01 rack2node02"),
        ("a-b.c[5]-x,y", "a-b.c5-x y"),
        (" n1 , n[2-3] ", "n1 n2 n3"),
    ],
)
def test_node_list_is_expanded(text: str, expected: str) -> None:
    """Expected values are the output of ``scontrol show hostnames``."""
    assert expand_node_list(text) == expected.split()


@pytest.mark.parametrize(
    "text",
    [
        *("", "a,,b", "n[1-2", "n1]", "n[[1]]", "n[3-1]", "n[]", "n[a-b]", "n[1-2-3]"),
        *(f"n[0-{MOST_NODES}]", "n[1-1000]m[1-1000]"),
    ],
)
def test_node_list_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="node list"):
        expand_node_list(text)


def test_names_of_headers_and_queries() -> None:
    names = "X-Api-Key", "api_key", "key", "Authorization", "X-Auth-Token", "apiKey", "access_token", "Cookie", "pwd"
    others = "sort_keys", "Content-Type", "X-Request-Id", "author", "max_tokens", "model"
    assert all(map(is_credential, names)) and not any(map(is_credential, others))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://h:80/v1", "http://h:80/v1"), ("https://me:SECRET@h/v1", "https://...@h/v1"),
        ("http://h/v1?api_key=SECRET", "http://h/v1?..."), ("http://me:SEC/RET@h/x", "http://..."),
        ("http://me:SEC?RET@h", "http://..."), ("http://[SECRET", "..."),
    ],
)  # fmt: skip
def test_no_url_is_printed_with_its_user_or_query(url: str, shown: str) -> None:
    assert redact_url(url) == shown


def test_a_file_appears_whole_or_not_at_all_and_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "out.jsonl", tmp_path / "out.jsonl"
    target.write_text("earlier")
    link.symlink_to(target)
    with pytest.raises(KeyboardInterrupt), whole_file(link) as file:
        file.write("half")
        raise KeyboardInterrupt
    assert target.read_text() == "earlier"
    with whole_file(link) as file:
        file.write("whole")
        assert target.read_text() == "earlier"
    assert link.is_symlink() and target.read_text() == "whole"
    assert list(target.parent.iterdir()) == [target]


def test_a_process_that_has_just_ended_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "pid_exists", lambda process_id: True)  # it was there when it was found
    end_processes([4_000_000], grace_s=0.0)  # no process has this id


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (memory_text(13.8 * 2**30), "13.8 GiB"),
        (memory_text(2**30), "1.00 GiB"),
        (memory_text(2**30 - 1), "1.00 GiB"),
        (memory_text(1500 * 2**30), "1,500 GiB"),  # the unit of cluster.host_memory_gib
        (memory_text(-(2**20)), "-1.00 MiB"),
        (memory_text(0), "0 B"),
        (traffic_text(36_176.5e9), "36.2 TB"),
        (traffic_text(2.16e9), "2.16 GB"),
        (seconds_text(1911.4), "1,911 s"),
        (seconds_text(305_583), "84.9 h"),
        (seconds_text(0.0123), "12.3 ms"),
        (seconds_text(7e-6), "7.00 us"),
        (seconds_text(0), "0 s"),
    ],
)
def test_three_digits_and_a_unit(text: str, expected: str) -> None:
    assert text == expected
