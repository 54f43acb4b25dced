"""Engines of an RL run or an evaluation, and everything that starts with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from itertools import starmap
from typing import TYPE_CHECKING

from slime_like.checks.engines import version_warning
from slime_like.config import ModelConfig, RunConfig, SyncConfig
from slime_like.config.roles import POLICY
from slime_like.errors import ConfigError, EngineError
from slime_like.interfaces.engine import load_engine
from slime_like.interfaces.engine_limits import engine_limits
from slime_like.models.dimensions import ModelDimensions
from slime_like.observability.progress import Progress
from slime_like.orchestration.cluster.node import logs_directory
from slime_like.orchestration.cluster.placement import Placement
from slime_like.orchestration.cluster.ray_calls import watch_none
from slime_like.orchestration.rollout.engines import DeviceSwitch, Engines
from slime_like.orchestration.trainer.batcher import packs_per_request
from slime_like.orchestration.trainer.model_ranks import ModelRanks
from slime_like.plugins.options import load_option
from slime_like.sandbox.rewards.pool import RewardPool
from slime_like.weights.expected_tensors import expected_tensors

if TYPE_CHECKING:
    from slime_like.orchestration.rollout.roles import RoleQueue


def require_servable(engine: str, model: ModelConfig, on_cuda: bool, routes: bool = False) -> None:
    """Reject a model that the engine's class does not support on these devices, before any engine starts. ``routes``:
    the class must return routes, too.

    The class may have a static method ``refusal(dimensions, on_cuda)`` that returns the reason.

    Raises:
        EngineError: with the engine's reason.
    """
    kind = load_engine(engine)
    refusal = getattr(kind, "refusal", None)
    reason = refusal and refusal(ModelDimensions.from_checkpoint(model.path), on_cuda)
    if reason:
        raise EngineError(reason, code="model-not-servable", who=f"rollout.engine={engine}")
    if routes and not getattr(kind, "returns_routes", False):
        problem, remedy = "it returns no routes for algorithm.routing_replay=rollout", "set that to none or old"
        raise EngineError(problem, code="no-routes", who=f"rollout.engine={engine}", remedy=remedy)


def require_quantizable(sync: SyncConfig, engine: str, model: ModelConfig, on_cuda: bool) -> None:
    """Reject ``sync.quantization`` if the engine cannot sample with 8-bit weights here, or the model has none.

    Raises:
        ConfigError: with the reason.
    """
    if sync.quantization == "none":
        return
    reason = engine_limits(engine).quantization_problem(on_cuda)
    if reason is None and not any(starmap(load_option("is-quantized"), expected_tensors(model.path).items())):
        reason = f"{model.path} has no matrix with a known name; use another model"
    if reason is not None:
        problem = f"sync.quantization={sync.quantization}: {reason}, or quantization: none"
        raise ConfigError([problem], code="sync.quantization")


def launch_engines(
    config: RunConfig,
    stack: ExitStack,
    placement: Placement,
    note: Callable[[str], None],
    shared_devices: Sequence[str] = (),
    watch: Callable[[], None] = watch_none,
) -> tuple[Engines, RewardPool]:
    """Launch engines and reward workers. ``start`` of either waits for it, and ``stack`` ends both."""
    engines = Engines(config, placement, note, watch)
    stack.callback(engines.shutdown)
    engines.launch(shared_devices)
    responses = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    pool = RewardPool(config.reward, responses, logs_directory())
    stack.callback(pool.close)
    return engines, pool


def start_engines(
    config: RunConfig,
    stack: ExitStack,
    placement: Placement,
    models: Mapping[str, ModelRanks],
    progress: Progress,
    set_up_trained: Callable[[], None],
) -> tuple[Engines, RewardPool, list[RoleQueue], DeviceSwitch]:
    """Set up models, engines and reward workers. All ranks have been launched.

    All import at the same time, and each wait has a separate bound. Colocated engines load while the trainers are off
    the devices, and are asleep on return.
    """
    colocated, policy = config.cluster.placement == "colocated", models[POLICY]
    if warning := version_warning(config.rollout.python, config.rollout.engine):
        progress.note(warning)
    shared_devices = policy.devices() if colocated else ()
    watch = policy.liveness("waiting for the engines")
    engines, rewards = launch_engines(config, stack, placement, progress.note, shared_devices, watch)
    set_up_trained()
    with progress.waiting("starting reward workers"):
        rewards.start()
    if colocated:
        policy.offload()
    with progress.waiting("engines", len(engines.instances)) as waiting:
        engines.start(waiting.on_waiting)
    workers = [model for model in models.values() if not model.role.trained]
    with progress.waiting(
        " and ".join(f"{role.name} workers" for role in config.roles.with_workers), len(workers)
    ) as waiting:
        pools = _role_pools(stack, workers, waiting.on_waiting)
    if not colocated:
        return engines, rewards, pools, DeviceSwitch()
    engines.sleep(keep_weights=False)  # the first sync follows
    policy.onload()
    return engines, rewards, pools, DeviceSwitch((policy, engines))


def _role_pools(
    stack: ExitStack, workers: Sequence[ModelRanks], on_waiting: Callable[[Sequence[str]], None]
) -> list[RoleQueue]:
    """Build a pool per role, which each worker joins after loading its weights. ``stack`` closes them.

    Args:
        on_waiting: called with the workers that are not ready yet.
    """
    loading = [worker.name for worker in workers]
    on_waiting(loading)
    with ThreadPoolExecutor(max(1, len(workers))) as threads:
        setups = {threads.submit(worker.setup): worker.name for worker in workers}
        for setup in as_completed(setups):
            setup.result()
            loading.remove(setups[setup])
            on_waiting(loading)
    pools: dict[str, RoleQueue] = {}
    for worker in workers:
        role = worker.role
        if role.name not in pools:
            trainer = worker.config.trainer
            tokens = trainer.target_tokens_per_batch * trainer.parallel.data * packs_per_request(trainer)
            pools[role.name] = load_option("role-queue")(role.name, tokens, role.max_restarts, role.source)
            stack.callback(pools[role.name].close)
        pools[role.name].join(worker)
    return list(pools.values())
