"""``slime-like launch``: the same command on every node of a cluster."""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from slime_like.commands.command import RESTARTS, Command, has_flag, option
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.errors import FAILED, ConfigError, Problem
from slime_like.launch.commands import DEFAULT_PORT, ExitNotes, LaunchOptions, RunVerdict
from slime_like.launch.restarts import ENDED, Restarts, is_restarted, leave_cause
from slime_like.system.gpus import local_gpus
from slime_like.system.network import expand_node_list
from slime_like.system.words import pluralize

SHORTEST_SILENCE_S = 6.0
"""Ray checks the health of a node several times before the node is lost."""

_GIVEN = LaunchOptions(config=None, flags=(), nodes=1, node_rank=0)
_TIME = "time limit in seconds (default: %(default)g) for"
_OPTIONS = (
    option("config", nargs="?", type=Path, metavar="CONFIG.yaml", help="configuration file"),
    option("--nodes", type=int, metavar="N", help="number of nodes (default: those of --slurm_nodes, else 1)"),
    option("--node_rank", type=int, default=0, metavar="R", help="this node's number, from 0"),
    option("--head", default="", metavar="ADDRESS", help="node 0's address (default: the first of --slurm_nodes)"),
    option("--slurm_nodes", default="", metavar="LIST", help="Slurm's node list, e.g. gpu[01-04]"),
    option("--address", default="", metavar="ADDRESS", help="this node's address (default: found by route to node 0)"),
    option("--port", type=int, default=DEFAULT_PORT, metavar="PORT", help="port of node 0's GCS (%(default)s)"),
    option("--token_file", type=Path, metavar="FILE", help="key shared by all nodes (default: next to run_dir)"),
    option("--gpus_per_node", type=int, metavar="M", help="GPUs per node (default: this node's, else the recipe's)"),
    option("--nodes_timeout_s", type=float, default=_GIVEN.nodes_timeout_s, metavar="S", help=f"{_TIME} nodes to join"),
    option("--ray_timeout_s", type=float, default=_GIVEN.ray_timeout_s, metavar="S", help=f"{_TIME} Ray to start"),
    option("--silence_s", type=float, default=_GIVEN.silence_s, metavar="S", help=f"{_TIME} a node to answer"),
    option("--stop_s", type=float, default=_GIVEN.stop_s, metavar="S", help=f"{_TIME} training to stop"),
    RESTARTS,
    option("--no_plan", dest="plan", action="store_false", help="do not run `slime-like plan` first"),
    option("--dry_run", action="store_true", help="print what every node would do; start nothing"),
)


def _run(given: argparse.Namespace, flags: list[str]) -> int:
    """Return the exit code, which is the same on every node."""
    if has_flag(flags, "cluster.address"):
        problem = "cluster.address cannot be set: launch starts the cluster; use slime-like train to join one"
        raise ConfigError(problem, code="flag-excluded")
    try:
        names = expand_node_list(given.slurm_nodes) if given.slurm_nodes else []
    except ValueError as error:
        raise ConfigError(f"--slurm_nodes: {error}", code="node-list") from error
    plain = _options(given, names, tuple(flags))
    options, config = _sized(plain, given.gpus_per_node)
    fallbacks = []
    for layout in config.cluster.fallback_layouts:
        if layout.nodes >= options.nodes:
            problem = f"cluster.fallback_layouts: nodes={layout.nodes} is not below --nodes={options.nodes}; lower it"
            raise ConfigError(problem, code="fallback-layout")
        smaller = replace(plain, nodes=layout.nodes, node_rank=0, flags=(*flags, *layout.flags))
        fallbacks.append(_sized(smaller, given.gpus_per_node))
    if given.dry_run:
        print(*_dry_run(options, config, names), sep="\n")
        return 0
    if given.restarts and not is_restarted():
        return _restarting(given, options, [config, *(smaller for _, smaller in fallbacks)])
    from slime_like.launch.nodes import launch

    verdict = launch(options, config, fallbacks)
    if verdict.sentence and options.nodes > 1:  # on a single node, the command has printed it
        print(f"slime-like: {verdict.sentence}", file=sys.stderr)
    if verdict.code == FAILED:
        leave_cause(verdict.fault, verdict.sentence)
    return verdict.code


def _restarting(given: argparse.Namespace, options: LaunchOptions, layouts: Sequence[RunConfig]) -> int:
    """Run this command as a child, as often as needed. If node 0 gives up, the others learn it from its exit note."""
    from slime_like.checks import training_needs
    from slime_like.checks.check import require_valid

    for config in layouts:
        require_valid(config, training_needs(config) - {"code"})  # the child imports the code, and torch
    config = layouts[0]
    first = given.argv if "--" in given.argv else [*given.argv, "--"]
    place = first.index("--")
    again = [*first[:place], "--no_plan", *first[place:]]  # the first start has planned

    def leave_note(sentence: str) -> None:
        if options.node_rank == 0 and options.nodes > 1:
            ExitNotes(config.run_dir, options).leave(RunVerdict(FAILED, sentence, ENDED))

    restarts = Restarts(config.run_dir, first, config.resume, given.restarts, again, options.node_rank)
    restarts.on_end = leave_note
    return restarts.run()


def _options(given: argparse.Namespace, names: list[str], flags: tuple[str, ...]) -> LaunchOptions:
    if given.head and given.nodes is None and not names:
        problem = f"--head={given.head} (HEAD_ADDR) needs the number of nodes; give --nodes (NODES)"
        raise ConfigError(problem, code="nodes-missing")
    if given.nodes is not None and names and given.nodes != len(names):
        problem = f"--nodes={given.nodes}, but --slurm_nodes names {len(names)} nodes; give one of the two"
        raise ConfigError(problem, code="options-conflict")
    if given.silence_s < SHORTEST_SILENCE_S:
        problem = f"--silence_s={given.silence_s:g} (SILENCE_S) is too short for Ray's health checks"
        raise ConfigError(f"{problem}; give at least {SHORTEST_SILENCE_S:g}", code="option-range")
    own = vars(given) | {
        "nodes": given.nodes if given.nodes is not None else max(1, len(names)),
        "head": given.head or (names[0] if names else ""),
        "token_file": given.token_file.absolute() if given.token_file else None,
    }
    for name in ("slurm_nodes", "dry_run", "gpus_per_node", "restarts", "argv"):
        del own[name]
    return LaunchOptions(flags=flags, **own)


def _sized(options: LaunchOptions, gpus_per_node: int | None) -> tuple[LaunchOptions, RunConfig]:
    """Add the cluster's size to the flags, and read the configuration with them.

    The number of GPUs per node is the given one, else this node's, else the recipe's. Without any, each node has as
    many CPU slots as the run needs.
    """
    size = ["--cluster.nodes", str(options.nodes)]
    if devices := gpus_per_node or local_gpus():
        size += ["--cluster.gpus_per_node", str(devices)]
    from slime_like.checks.check import check

    def problems(config: RunConfig) -> list[Problem]:
        return [one for one in check(config) if devices or one.code != "cluster.gpus-idle"]  # slots are not hardware

    config = load_config(options.config, [*options.flags, *size], more=problems)
    if not devices and "gpus_per_node" in config.cluster.model_fields_set:
        size += ["--cluster.gpus_per_node", str(config.cluster.gpus_per_node)]
    elif not devices:
        from slime_like.orchestration.cluster.bundles import pieces_of, slots_per_node

        slots = slots_per_node(pieces_of(config), config.trainer.parallel.tensor, options.nodes)
        size += ["--cluster.gpus_per_node", str(slots)]
        size += ["--cluster.allow_idle_gpus", "true"]  # slots are not hardware
        config = load_config(options.config, [*options.flags, *size])
    return replace(options, flags=(*options.flags, *size)), config


def _dry_run(options: LaunchOptions, config: RunConfig, names: Sequence[str]) -> Iterator[str]:
    """Describe the launch and its problems on this node. Nothing is started, resolved or written."""
    from slime_like.checks.check import check
    from slime_like.launch.commands import plan_arguments, train_arguments
    from slime_like.orchestration.cluster.bundles import pieces_of
    from slime_like.planning.checks import placement_problems

    parallel, devices = config.trainer.parallel, config.cluster.gpus_per_node
    yield f"nodes:    {options.nodes}" + (f" ({', '.join(names)})" if names else "")
    yield f"this one: node {options.node_rank}" + (", which leads" if options.node_rank == 0 else "")
    pieces, engines = pieces_of(config), pluralize(config.rollout.num_engines, "engine")
    needed = sum(pieces.bundles)
    idle = options.nodes * devices - needed
    amiss = " (TOO FEW)" if idle < 0 else f" ({idle} IDLE)" if idle else ""
    fits = idle >= 0 and max(pieces.ranks) <= devices
    stays = " (each stays on one node)" if fits else ""
    ranks = f"{pluralize(parallel.world_size, 'trainer rank')} in {pluralize(len(pieces.ranks), 'group')}{stays}"
    layout = f"trainer.parallel.data {parallel.data}, {engines}, placement {config.cluster.placement}"
    yield f"devices:  {needed} needed, {options.nodes} x {devices} there{amiss}; {ranks}, {layout}"
    if options.nodes > 1:
        head = f"{options.head}:{options.port}"
        yield f"key:      {options.token_path(config.run_dir)} (made by node 0; mode 600)"
        yield f"node 0:   starts Ray's head, which listens on {head}, and waits at most {options.nodes_timeout_s:g} s"
        yield f"others:   join Ray's head at {head}, with the key as Ray's token"
    if options.plan:
        yield f"plan:     slime-like {shlex.join(plan_arguments(options, config.run_dir))}"
    address = "ADDRESS_OF_RAYS_HEAD" if options.nodes > 1 else None
    yield f"train:    slime-like {shlex.join(train_arguments(options, address))}"
    yield f"run_dir:  {config.run_dir} (resume: {config.resume})"
    for problem in (*(() if fits else placement_problems(config)), *check(config)):
        yield f"not yet:  {problem}"


COMMAND = Command(
    "launch",
    "train on several nodes: the same command on each of them",
    _run,
    "Train on several nodes: start Ray on each, wait for all nodes, plan, train, and exit everywhere\n"
    "with the same code and cause. Flags of `slime-like train` follow --. scripts/run_qwen_32b.sh calls\n"
    "this command with values of Slurm or of environment variables.",
    _OPTIONS,
    "[CONFIG.yaml] --nodes N --node_rank R --head ADDRESS [options] [-- --section.field VALUE ...]",
    takes_flags=False,
)
