"""A run on several nodes: node 0 leads, the others follow. Every node ends with the same exit code and cause.

Whoever is lost meanwhile ends the run on all.
"""

from __future__ import annotations

import os
import socket

from slime_like.checks.check import require_valid
from slime_like.config import RunConfig
from slime_like.errors import FAILED, SlimeLikeError
from slime_like.launch.arguments import devices_per_node, fresh_plan_path, plan_arguments, train_arguments
from slime_like.launch.cluster_key import key_path
from slime_like.launch.coordinator import lead
from slime_like.launch.exit import failure
from slime_like.launch.exit_notes import Awaited, LastWords
from slime_like.launch.messages import Verdict
from slime_like.launch.options import LaunchOptions, find_place
from slime_like.launch.participant import follow
from slime_like.launch.subcommand import Child


def launch(options: LaunchOptions, config: RunConfig) -> Verdict:
    """Take part in a run on ``options.nodes`` nodes, until it has ended on all of them.

    Raises:
        ConfigError: before this node has met the others, which find the reason beside the key.
        LaunchError: in the same way: there is no key, the port is taken, or node 0 does not answer.
    """
    if options.nodes == 1:
        require_valid(config)
        return _alone(options, config)
    words = LastWords(config.run_dir, options.node_rank)
    words.take_back()
    try:
        return _take_place(options, config, words)
    except SlimeLikeError as error:
        words.leave_or_complain(failure(error))
        raise
    except KeyboardInterrupt:
        interrupted = f"interrupted on node {options.node_rank} ({socket.gethostname()})"
        words.leave_or_complain(Verdict(FAILED, interrupted))
        raise


def _take_place(options: LaunchOptions, config: RunConfig, words: LastWords) -> Verdict:
    key_file = options.key_file or key_path(config.run_dir)
    if not options.leads:
        return follow(options, config, find_place(options), key_file)
    # First of all: words that another node leaves while this one still checks are of this start.
    others = {rank: Awaited.of_start(config.run_dir, rank, options) for rank in range(1, options.nodes)}
    require_valid(config)
    return lead(options, config, find_place(options), key_file, words, others)


def _alone(options: LaunchOptions, config: RunConfig) -> Verdict:
    """One node: its Ray is training's own, on loopback."""
    steps = [train_arguments(options, None)]
    if options.plan:
        steps.insert(0, plan_arguments(options, devices_per_node(options, config), fresh_plan_path(config)))
    for arguments in steps:
        with Child(arguments, os.environ, options.stop_s) as child:
            code = child.wait(lambda: None)
        if code:
            return Verdict(code)  # it has said why
    return Verdict(0)
