"""Packages that a rank's machine needs to compile kernels for its GPU."""

from pathlib import Path

import pytest

from slime_like.checks import packages
from slime_like.checks.packages import missing_compiler


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
