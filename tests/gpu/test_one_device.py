"""Test both trainers' shared prefixes, supports, factors, layers of every kind, saves, reference and offloading."""

from pathlib import Path

import pytest

from slime_like.interfaces import RankPlacement
from tests.parallel.one_device import CHECKS, LAYERS, run_check
from tests.parallel.ranks import held_ports

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [*CHECKS, *LAYERS])
def test_on_a_gpu(name: str, tmp_path: Path) -> None:
    with held_ports(1) as (port,):
        run_check(RankPlacement(0, 1, 0, "127.0.0.1", port), name, tmp_path)
