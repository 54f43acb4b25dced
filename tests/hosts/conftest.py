"""Two hosts for a module."""

import shutil
from collections.abc import Iterator

import pytest

from tests.conftest import Tiny
from tests.hosts.hosts import Network, two_hosts


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Iterator[Network]:
    """Hosts that share the tiny model and its data."""
    with two_hosts(tmp_path_factory.mktemp("shared")) as network:
        shutil.copytree(tiny.model, network.shared / "model")
        shutil.copytree(tiny.data, network.shared / "data")
        yield network
