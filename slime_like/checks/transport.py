"""Choice of the transport of a run's weights."""

from slime_like.checks.engine_install import engine_libraries
from slime_like.config import RunConfig
from slime_like.weights.transports.registry import transport_of


def chosen_transport(config: RunConfig, on_cuda: bool, num_hosts: int) -> str:
    """Return ``transport_of`` with the libraries of this environment and of ``rollout.python``. Raises like it."""
    engines = engine_libraries(config.rollout.python)
    return transport_of(config.sync, config.cluster, on_cuda, num_hosts, engine_libraries(None), engines)
