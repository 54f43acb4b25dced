"""A store that Ray would refuse is rejected in a sentence of our own; one that it would take is not."""

from pathlib import Path
from types import SimpleNamespace

import psutil  # type: ignore[import-untyped]
import pytest
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray._private.services import determine_plasma_store_config

from slime_like.orchestration.cluster import object_store
from slime_like.orchestration.cluster.object_store import object_store_problem

GIB = 2**30
CASES: list[tuple[int, int, int, str | None]] = [
    (512, 8 * GIB, 4 * GIB, None),
    (512, 8 * GIB, GIB // 16, None),  # Docker's /dev/shm: the store lies on disk
    (8192, 8 * GIB, 8 * GIB, "of this machine's memory 8192 MiB are free, and the run needs some, too; lower"),
    (20_000, 64 * GIB, 16 * GIB, "/dev/shm, which holds it, has 16384 MiB left; use at most 16384, or make"),
    (20_000, 64 * GIB, 4 * GIB, "/dev/shm, which holds it, has 4096 MiB left; use at most 9536, or make"),
    (20_000, 64 * GIB, 32 * GIB, None),
    (80, GIB // 16, GIB, "of this machine's memory 64 MiB are free, and the run needs some, too; lower it"),
]


@pytest.mark.parametrize(("size_mb", "memory", "shared", "expected"), CASES)
def test_what_ray_refuses_is_refused_in_our_words(
    size_mb: int, memory: int, shared: int, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("estimate_available_memory", memory), ("get_shared_memory_bytes", shared)):
        monkeypatch.setattr(f"ray._private.utils.{name}", lambda value=value: value)
    monkeypatch.setattr(object_store, "available_memory", lambda: memory)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=shared))
    monkeypatch.setattr("ray._common.utils.get_system_memory", lambda: 64 * GIB)
    problem = object_store_problem(size_mb)
    assert (problem is None) == _ray_takes_it(size_mb)
    assert problem is None or problem.startswith(f"cluster.object_store_mb={size_mb}: {expected}")
    assert (problem is None) == (expected is None)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("limited", [False, True])
def test_a_container_s_memory_counts_without_the_caches_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, limited: bool
) -> None:
    directory, total = tmp_path if version == 2 else tmp_path / "memory", 64 * GIB
    directory.mkdir(exist_ok=True)
    limit, usage, prefix = object_store._CGROUPS[2 - version]
    unlimited = {1: 2**63 - 4096, 2: "max"}[version]
    (directory / limit).write_text(f"{8 * GIB if limited else unlimited}\n")
    (directory / usage).write_text(f"{5 * GIB}\n")
    (directory / "memory.stat").write_text(f"anon 7\n{prefix}inactive_file {2 * GIB}\n{prefix}active_file {GIB}\n")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total, used=3 * GIB))
    assert object_store.available_memory(tmp_path) == (8 * GIB if limited else total) - 2 * GIB
    assert object_store.available_memory(tmp_path / "none") == total - 3 * GIB


def _ray_takes_it(size_mb: int) -> bool:
    nbytes = size_mb * 2**20
    try:
        ResourceAndLabelSpec(num_cpus=1, num_gpus=0, object_store_memory=nbytes).resolve(
            is_head=True, node_ip_address=""
        )
        determine_plasma_store_config(nbytes, "/tmp")
    except ValueError:
        return False
    return True
