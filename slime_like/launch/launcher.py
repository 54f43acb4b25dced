"""A run on several nodes: node 0 leads, the others follow. Every node ends with the same exit code and cause."""

import os
import socket

from slime_like.checks.check import require_valid
from slime_like.config import RunConfig
from slime_like.config.launch import LaunchOptions
from slime_like.errors import FAILED, INTERRUPTED, SlimeLikeError
from slime_like.launch.commands import run_command, run_plan, train_arguments
from slime_like.launch.coordinator import lead
from slime_like.launch.exit import ExitNotes, NodeEndedError, RefusedError, Verdict, failure
from slime_like.launch.participant import follow
from slime_like.system.interrupts import take_interrupt


def launch(options: LaunchOptions, config: RunConfig) -> Verdict:
    """Take part in a run on ``options.nodes`` nodes until it has ended on all of them.

    Raises:
        SlimeLikeError: a failure before Ray connected this node. The other nodes find the reason in its exit note.
    """
    if options.nodes == 1:  # training starts Ray on loopback
        require_valid(config)
        verdict = run_plan(options, config.run_dir, os.environ)
        if not verdict.code:
            verdict = run_command(train_arguments(options, None), os.environ, options.stop_s)
        return Verdict(verdict.code)  # the command has printed the cause
    notes, here = ExitNotes(config.run_dir, options), f"node {options.node_rank} ({socket.gethostname()})"
    try:
        return lead(options, config, notes) if options.leads else follow(options, config, notes)
    except NodeEndedError as ended:
        return ended.verdict
    except RefusedError:
        raise
    except Exception as error:
        notes.leave(failure(error, "" if isinstance(error, SlimeLikeError) else here))
        raise
    except KeyboardInterrupt:
        take_interrupt()
        notes.leave(Verdict(FAILED, f"interrupted on {here}"))
        return Verdict(INTERRUPTED, f"interrupted on {here}")
