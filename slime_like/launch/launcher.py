"""A run on several nodes: node 0 leads, the others follow. Every node ends with the same exit code and cause."""

from __future__ import annotations

import os
import socket

from slime_like.checks.check import require_valid
from slime_like.config import RunConfig
from slime_like.errors import FAILED, SlimeLikeError
from slime_like.launch.arguments import plan_arguments, remove_plan, train_arguments
from slime_like.launch.coordinator import lead
from slime_like.launch.exit import NodeEndedError, RefusedError, Verdict, failure
from slime_like.launch.exit_notes import ExitNotes
from slime_like.launch.options import LaunchOptions
from slime_like.launch.participant import follow
from slime_like.system.subcommand import Child


def launch(options: LaunchOptions, config: RunConfig) -> Verdict:
    """Take part in a run on ``options.nodes`` nodes, until it has ended on all of them.

    Raises:
        SlimeLikeError: before Ray connected this node with the others, which find the reason in its exit note.
    """
    if options.nodes == 1:
        require_valid(config)
        return _alone(options, config)
    notes = ExitNotes(config.run_dir, options)
    try:
        return lead(options, config, notes) if options.leads else follow(options, config, notes)
    except NodeEndedError as ended:
        if options.leads:
            notes.leave(ended.verdict)
        return ended.verdict
    except RefusedError:
        raise
    except SlimeLikeError as error:
        notes.leave(failure(error))
        raise
    except KeyboardInterrupt:
        notes.leave(Verdict(FAILED, f"interrupted on node {options.node_rank} ({socket.gethostname()})"))
        raise


def _alone(options: LaunchOptions, config: RunConfig) -> Verdict:
    """One node: its Ray is training's own, on loopback."""
    steps = [train_arguments(options, None)]
    if options.plan:
        remove_plan(config)
        steps.insert(0, plan_arguments(options, config))
    for arguments in steps:
        with Child(arguments, os.environ, options.stop_s) as child:
            code = child.wait(lambda: None)
        if code:
            return Verdict(code)  # its own output says why
    return Verdict(0)
