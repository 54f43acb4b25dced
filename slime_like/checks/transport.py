"""The transport of a run's weights, by what is installed on both sides."""

from slime_like.checks.engine_install import engine_libraries
from slime_like.config import RunConfig
from slime_like.weights.transports.registry import transport_of


def chosen_transport(config: RunConfig, on_cuda: bool, num_hosts: int) -> str:
    """``transport_of`` this environment's trainers and the engines of ``rollout.python``; raises as it does."""
    return transport_of(config, on_cuda, num_hosts, engine_libraries(None), engine_libraries(config.rollout.python))
