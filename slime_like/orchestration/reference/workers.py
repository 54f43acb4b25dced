"""Workers of frozen roles: ranks that score groups with a role's weights while others are sampled."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack

from slime_like.orchestration.rollout.role_pool import RolePool
from slime_like.orchestration.trainer.batcher import request_tokens
from slime_like.orchestration.trainer.model_ranks import ModelRanks


def role_pools(
    stack: ExitStack, workers: Sequence[ModelRanks], left: Callable[[Sequence[str]], None]
) -> list[RolePool]:
    """Build a pool per role, which each worker joins after loading its weights. ``stack`` closes them.

    Args:
        left: called with the workers that are not ready yet.
    """
    loading = [worker.name for worker in workers]
    left(loading)
    with ThreadPoolExecutor(max(1, len(workers))) as threads:
        setups = {threads.submit(worker.setup): worker.name for worker in workers}
        for setup in as_completed(setups):
            setup.result()
            loading.remove(setups[setup])
            left(loading)
    pools = dict[str, RolePool]()
    for worker in workers:
        role = worker.role
        if role.name not in pools:
            pools[role.name] = RolePool(
                role.name, request_tokens(worker.config.trainer), role.max_restarts, role.source
            )
            stack.callback(pools[role.name].close)
        pools[role.name].join(worker)
    return list(pools.values())
