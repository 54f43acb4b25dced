"""Compiled kernels are kept, never when they are not what their sources say, and are not needed; products by oneDNN."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import slime_like.cpu.kernels
from tests.process.conftest import python

KERNEL = """
import numpy as np
from numba import float32
from slime_like.cpu.kernels.compiling import kernel
from slime_like.cpu.kernels.helper import added

@kernel(float32[::1])
def forward(x):
    for i in range(x.shape[0]):
        x[i] = added(x[i])
"""
HELPER = """
import numpy as np
from slime_like.cpu.kernels.compiling import part

@part()
def added(x):
    return x + np.float32(%d)
"""
CALL = """
import numpy as np
from slime_like.cpu.kernels import example, compiling
x = np.zeros(3, np.float32)
example.forward(x)
print(int(x[0]), sum(example.forward.stats.cache_hits.values()), compiling._directory())
try:
    example.forward(np.zeros(3))
except TypeError:
    print("refused")
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with this compiling, one kernel, and what it calls in another file."""
    kernels = tmp_path / "slime_like" / "cpu" / "kernels"
    kernels.mkdir(parents=True)
    for folder in (kernels, *kernels.parents[:2]):
        (folder / "__init__.py").touch()
    package = Path(slime_like.cpu.kernels.__path__[0])
    shutil.copy(package / "compiling.py", kernels)
    shutil.copy(package.parents[1] / "errors.py", tmp_path / "slime_like")
    (kernels / "example.py").write_text(KERNEL)
    (kernels / "helper.py").write_text(HELPER % 1)
    return tmp_path


def call(package: Path) -> tuple[int, int, str]:
    """What the kernel adds to 0, how often it was read instead of compiled, and where from, in a fresh process."""
    environment = {"HOME": str(package / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    first, second = python(CALL, cwd=package, env=environment).splitlines()
    assert second == "refused"  # float64
    added, hits, directory = first.split(maxsplit=2)
    return int(added), int(hits), directory


def test_it_is_kept_until_anything_that_it_is_made_of_changes(package: Path) -> None:
    assert call(package)[:2] == (1, 0)
    assert call(package)[:2] == (1, 1)
    (package / "slime_like" / "cpu" / "kernels" / "helper.py").write_text(HELPER % 2)
    assert call(package)[:2] == (2, 0)


def test_a_damaged_one_is_compiled_anew(package: Path) -> None:
    _, _, directory = call(package)
    (kept,) = Path(directory).glob("*.kernel")
    whole = kept.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damaged in (whole[:-9], flipped, b""):
        kept.write_bytes(damaged)
        assert call(package)[:2] == (1, 0)
    assert call(package)[:2] == (1, 1)


def test_in_the_users_home_where_the_package_cannot_be_written_and_else_by_every_process(package: Path) -> None:
    # Files where directories would have to be: permissions do not hold root back.
    (package / "slime_like" / "cpu" / "kernels" / "__pycache__").touch()
    assert call(package)[:2] == (1, 0)
    _, hits, directory = call(package)
    assert hits == 1 and Path(directory).is_relative_to(package / "home")
    shutil.rmtree(package / "home")
    (package / "home").touch()
    assert call(package) == (1, 0, "None")


def test_a_start_without_compiling_fails_with_one_sentence(package: Path) -> None:
    """Also by Numba's own file, which no check of the environment sees."""
    (package / ".numba_config.yaml").write_text("disable_jit: 1")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        call(package)
    last = failed.value.stderr.splitlines()[-1]
    assert last.startswith("slime_like.errors.SlimeLikeError: NUMBA_DISABLE_JIT keeps Numba from") and "unset" in last


def test_what_no_process_has_started_with_for_a_month_is_removed(package: Path) -> None:
    """Neither what is in use, however old its files, nor anything of another name, nor what a link leads to."""
    _, _, kept = call(package)
    base, month = Path(kept).parent, 30 * 24 * 3600
    elsewhere = package / "elsewhere"
    for directory in (base / "kernels-old", base / "kernels-new", base / "others", elsewhere):
        directory.mkdir()
        (directory / "one.kernel").touch()
    (base / "kernels-link").symlink_to(elsewhere)
    for directory in (Path(kept), base / "kernels-old", base / "others", elsewhere):
        os.utime(directory, (time.time(), time.time() - month - 3600))
    os.utime(base / "kernels-new", (time.time(), time.time() - month + 3600))
    assert call(package) == (1, 1, kept)
    left = {path.name for path in base.iterdir()}
    assert left >= {Path(kept).name, "kernels-new", "others", "kernels-link"} and "kernels-old" not in left
    assert (elsewhere / "one.kernel").exists()


WHICH = """
import gc, torch
from slime_like.cpu.onednn import replaced_products

def by_onednn():
    a = torch.ones(300, 300)
    with torch.profiler.profile() as profile:
        torch.mm(a, a)
    return "mkldnn::_linear_pointwise" in [event.key for event in profile.key_averages()]

print(by_onednn())
kept = replaced_products()
print(by_onednn())
del kept
gc.collect()
print(by_onednn())
"""


def test_large_products_go_to_onednn_while_it_lasts() -> None:
    """In a separate process: in this one an engine may have asked for it, for good."""
    assert python(WHICH).split() == ["False", "True", "False"]
