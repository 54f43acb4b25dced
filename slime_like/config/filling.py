"""Number of GPUs that a configuration uses, and sizes that fill its cluster."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from slime_like.config.roles import CRITIC
from slime_like.config.run import RunConfig
from slime_like.errors import ConfigError
from slime_like.system.words import pluralize

AUTO = "auto"
REPLICAS, ENGINES = "trainer.parallel.data", "rollout.num_engines"
FILLING = (REPLICAS, ENGINES)
"""Fields that accept ``auto``. The configuration holds the numbers that it resolves to."""


@dataclass(frozen=True, slots=True)
class GpusNeeded:
    """GPUs of trainer ranks, of engines that do not share them, and of other roles' ranks."""

    trainers: int
    engines: int
    workers: Mapping[str, int]

    @property
    def total(self) -> int:
        return self.trainers + self.engines + sum(self.workers.values())

    def nodes(self, gpus_per_node: int) -> int:
        """Count the nodes that hold every trainer rank, engine and worker rank."""
        return -(-self.total // gpus_per_node)

    def __str__(self) -> str:
        workers = ((count, role if role == CRITIC else f"{role} workers") for role, count in self.workers.items())
        parts = ((self.trainers, "trainer ranks"), (self.engines, "engines"), *workers)
        named = " + ".join(f"{count} for {whose}" for count, whose in parts if count)
        return f"{pluralize(self.total, 'GPU')} ({named})"


def gpus_needed(config: RunConfig) -> GpusNeeded:
    """Count the GPUs that a training run uses."""
    engines = config.rollout.num_engines * config.rollout.ranks if config.has_own_engines else 0
    workers = {role.name: role.workers * role.parallel.world_size for role in config.roles.placed}
    return GpusNeeded(config.trainer.parallel.world_size, engines, workers)


def fill(config: RunConfig, names: Collection[str]) -> RunConfig:
    """Replace these fields with the largest sizes that fit the cluster, at least 1.

    Replicas get the GPUs that separate engines and workers do not use. Separate engines get the GPUs that the trainer
    and workers do not use. Colocated engines share the trainer's GPUs. Raises ``ConfigError`` if the cluster's size is
    not given, or both separate engines and replicas are ``auto``.
    """
    rollout, trainer, cluster = config.rollout, config.trainer, config.cluster
    given = " and ".join(f"{name}={AUTO}" for name in FILLING if name in names)
    if cluster.nodes is None or "gpus_per_node" not in cluster.model_fields_set:
        problem = "needs cluster.nodes and cluster.gpus_per_node (without GPUs: ranks per node)"
        raise ConfigError(f"{given} {problem}; give both, or give a number", code="auto-without-size")
    if set(FILLING) <= set(names) and config.has_own_engines:
        problem = f"{given}: each depends on the other; give one of them, or set cluster.placement=colocated"
        raise ConfigError(problem, code="auto-ambiguous")
    if REPLICAS in names:
        needed, parallel = gpus_needed(config), trainer.parallel
        # A critic on its own devices has by default the policy's number of replicas, so its size grows with it.
        follows = config.critic.parallel is None or "data" not in config.critic.parallel.model_fields_set
        growing = needed.trainers + follows * needed.workers.get(CRITIC, 0)
        left = (cluster.nodes or 0) * cluster.gpus_per_node - (needed.total - growing)
        data = max(1, left // (growing // parallel.data))
        trainer = trainer.model_copy(update={"parallel": parallel.model_copy(update={"data": data})})
        config = config.model_copy(update={"trainer": trainer})
    if ENGINES in names:
        needed, gpus = gpus_needed(config), trainer.parallel.world_size
        if config.has_own_engines:
            gpus = (cluster.nodes or 0) * cluster.gpus_per_node - (needed.total - needed.engines)
        rollout = rollout.model_copy(update={"num_engines": max(1, gpus // rollout.ranks)})
        config = config.model_copy(update={"rollout": rollout})
    return config
