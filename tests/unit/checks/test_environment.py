"""Environment variables that break runs on GPUs, and packages that compile kernels for them."""

import sys
from pathlib import Path

import pytest

from slime_like.checks import packages
from slime_like.checks.check import check
from slime_like.checks.definition import RANKS
from slime_like.checks.packages import logging_problems, missing_compiler
from slime_like.config import LoggingConfig, RunConfig

SHOWS_ALL = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("value", "gpus", "rejected"), [("1", 8, True), ("TRUE", 8, True), ("0", 8, False), ("1", 0, False)]
)
def test_devices_that_ray_shows_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, gpus: int, rejected: bool
) -> None:
    """The variable has no effect on a machine without GPUs."""
    monkeypatch.setenv(SHOWS_ALL, value)
    monkeypatch.setattr(packages, "local_gpus", lambda: gpus)
    config = RunConfig(run_dir=tmp_path / "run", model={"path": tmp_path})
    found = [problem for problem in check(config, RANKS) if problem.code == "cluster.visible-devices"]
    assert bool(found) is rejected
    assert all(f"{SHOWS_ALL}={value}" in problem.text and "unset it" in problem.text for problem in found)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"}, "PYTORCH_ALLOC_CONF=max_split_"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}, None),  # the first counts
    ],
)
def test_expandable_segments_of_the_user(variables: dict[str, str], expected: str | None) -> None:
    found = packages.expandable_segments(variables)
    assert (found is None) == (expected is None) and (found or "").startswith(expected or "")


def test_triton_needs_a_compiler_and_pythons_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[str] = set()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CPATH", raising=False)
    monkeypatch.setattr(packages, "which", lambda name: name if name in found else None)
    monkeypatch.setattr(packages.sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    compiler, headers = missing_compiler(on_cuda=True)
    assert "no C compiler; install gcc" in compiler and f"{tmp_path}: " in headers
    assert not [*missing_compiler(on_cuda=False)]
    (tmp_path / "Python.h").touch()
    found.add("clang")
    assert not [*missing_compiler(on_cuda=True)]
    found.clear()
    monkeypatch.setenv("CC", "cc")
    assert not [*missing_compiler(on_cuda=True)]


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard"])
def test_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tracker: str) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)  # marks a module that cannot be imported
    (problem,) = logging_problems(LoggingConfig(**{"tensorboard": False, tracker: True}))
    assert problem.startswith(f"logging.{tracker}=true needs its package")
    assert not list(logging_problems(LoggingConfig(tensorboard=False)))
