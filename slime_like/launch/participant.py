"""Every node but the first: report, start Ray when told to, stay until told how it ended."""

from __future__ import annotations

import time
from pathlib import Path

from slime_like.checks.check import require_valid
from slime_like.config import RunConfig
from slime_like.errors import FAILED, INTERRUPTED, LaunchError, SlimeLikeError
from slime_like.launch.arguments import ray_spec
from slime_like.launch.cluster_key import await_key
from slime_like.launch.exit import failure, sentence
from slime_like.launch.exit_notes import Awaited, NodeEndedError
from slime_like.launch.membership import Lost, Membership
from slime_like.launch.messages import Hello, Join, Joined, Look, Problem, Seen, Verdict
from slime_like.launch.options import LaunchOptions, Place
from slime_like.launch.progress import say
from slime_like.launch.ray_node import RayNode, ray_environment
from slime_like.launch.shared_directory import require_seen
from slime_like.launch.versions import installed_versions
from slime_like.system.interrupts import take_interrupt

_HEAR_S = 30.0


def follow(options: LaunchOptions, config: RunConfig, place: Place, key_file: Path) -> Verdict:
    """Take part until node 0 says how it ended, or is lost.

    Raises:
        LaunchError: node 0 cannot be found.
    """
    try:
        member = _find_node_0(options, config, place, key_file)
    except NodeEndedError as ended:
        return ended.verdict
    with member as head:
        try:  # around the first word, too: from then on node 0 knows this node, and must hear what ends it
            head.say(Hello(place.rank, place.host, place.address, installed_versions()))
            say(place, f"reported to node 0 at {place.head}:{options.port} from {place.address} ({place.interface})")
            return _take_part(options, config, place, key_file, head)
        except SlimeLikeError as error:
            head.say(Problem(sentence(error)))
            _await_verdict(head, _HEAR_S)  # so that node 0 has heard it before the connection ends
            return failure(error, str(place))
        except KeyboardInterrupt:
            return _interrupted(head, place)


def _find_node_0(options: LaunchOptions, config: RunConfig, place: Place, key_file: Path) -> Membership:
    """
    Raises:
        NodeEndedError: node 0 has ended.
        LaunchError: it has made no key, does not answer in time, or does not know the key.
    """
    awaited = Awaited.of_start(config.run_dir, 0, options).require_not_ended
    deadline = time.monotonic() + options.nodes_timeout_s
    key = await_key(key_file, options.nodes_timeout_s, awaited)
    left_s = max(1.0, deadline - time.monotonic())
    return Membership.open(place.head, options.port, key, left_s, options.silence_s, awaited)


def _take_part(options: LaunchOptions, config: RunConfig, place: Place, key_file: Path, head: Membership) -> Verdict:
    require_valid(config)  # every node looks for itself: paths may exist on one and not on another
    while not isinstance(event := head.next_event(), (Join, Verdict, Lost)):
        if isinstance(event, Look):
            require_seen(Path(event.witness), config.run_dir)
            head.say(Seen())
    if not isinstance(event, Join):
        return _as_verdict(event, place)
    spec = ray_spec(options, config, place, event.gcs)
    with RayNode(spec, ray_environment(key_file), options.ray_timeout_s) as node:
        ready = node.wait_ready()
        head.say(Joined())
        say(place, f"joined Ray's head at {event.gcs}, logs in {ready.logs}")
        try:
            while not isinstance(end := head.next_event(), (Verdict, Lost)):
                problem = node.problem()
                if problem:
                    raise LaunchError(problem)
        except KeyboardInterrupt:  # Ray stays here until training has ended in good order
            return _interrupted(head, place)
        return _as_verdict(end, place)


def _interrupted(head: Membership, place: Place) -> Verdict:
    take_interrupt()
    head.say(Problem("interrupted there"))
    _await_verdict(head, _HEAR_S)
    return Verdict(INTERRUPTED, f"interrupted on {place}")


def _await_verdict(head: Membership, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if isinstance(head.next_event(), (Verdict, Lost)):
            return


def _as_verdict(event: Verdict | Lost, place: Place) -> Verdict:
    if isinstance(event, Verdict):
        return event
    return Verdict(
        FAILED,
        f"{place} has lost node 0 ({place.head}): {event.how}; started again on all nodes, the run goes on from its "
        "last checkpoint",
    )
