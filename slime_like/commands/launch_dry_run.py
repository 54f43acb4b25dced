"""Description of a launch and of its problems on this node; nothing is started, resolved or written."""

import shlex
from collections.abc import Iterator, Sequence

from slime_like.checks.check import check
from slime_like.config import RunConfig
from slime_like.config.launch import LaunchOptions
from slime_like.launch.commands import plan_arguments, train_arguments
from slime_like.orchestration.cluster.bundles import bundle_sizes, tensor_blocks
from slime_like.orchestration.cluster.devices import devices_per_node


def print_dry_run(options: LaunchOptions, config: RunConfig, names: Sequence[str]) -> None:
    """Args: ``names`` are the nodes' host names, where Slurm lists them."""
    for line in lines(options, config, names):
        print(line)


def lines(options: LaunchOptions, config: RunConfig, names: Sequence[str]) -> Iterator[str]:
    parallel = config.trainer.parallel
    devices = devices_per_node(config, options.nodes, options.gpus_per_node)
    yield f"nodes:    {options.nodes}" + (f" ({', '.join(names)})" if names else "")
    yield f"this one: node {options.node_rank}" + (", which leads" if options.leads else "")
    needed = sum(bundle_sizes(config))
    few = " (TOO FEW)" if needed > options.nodes * devices else ""
    yield (
        f"devices:  {needed} needed, {options.nodes} x {devices} there{few}; {parallel.world_size} "
        f"trainer ranks in {len(tensor_blocks(config))} groups that stay on one node each, placement "
        f"{config.cluster.placement}"
    )
    if options.nodes > 1:
        head = f"{options.head}:{options.port}"
        yield f"key:      {options.token_path(config.run_dir)} (made by node 0; mode 600)"
        yield f"node 0:   starts Ray's head, which listens on {head}, and waits at most {options.nodes_timeout_s:g} s"
        yield f"others:   join Ray's head at {head}, with the key as Ray's token"
    if options.plan:
        yield f"plan:     {_shown(plan_arguments(options, config))}"
    address = "ADDRESS_OF_RAYS_HEAD" if options.nodes > 1 else None
    yield f"train:    {_shown(train_arguments(options, address))}"
    yield f"run_dir:  {config.run_dir} (resume: {config.resume})"
    for problem in check(config):
        yield f"not yet:  {problem}"


def _shown(arguments: Sequence[str]) -> str:
    return shlex.join(["slime-like", *arguments])
