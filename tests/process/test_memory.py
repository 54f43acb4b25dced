"""Freed memory that is allocated again, and objects exempt from garbage collection."""

import platform

import pytest

from tests.process.conftest import python

_CYCLE = """
from slime_like.system.processes import permanent_allocations
class Kept:
    def __init__(self): self.itself = self
    def __del__(self): print("freed")
with permanent_allocations():
    Kept()
"""

_FAULTS = """
import resource, sys
from slime_like.system.processes import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
faults = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    del_me = [bytearray(48 * 2**20) for _ in range(2)]
    del del_me
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults[1:]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_blocks_cause_no_more_page_faults() -> None:
    again, kept = (int(python(_FAULTS, mode)) for mode in ("returned", "kept"))
    assert again > 100  # not more: pages may be huge
    assert kept < again / 10


def test_permanent_objects_are_freed_when_the_process_ends() -> None:
    """Packages that count their objects, like nanobind in Triton, would print a page of warnings."""
    assert python(_CYCLE) == "freed\n"
