"""Node 0: await the others, start Ray's head, have them join, train, tell everybody how it ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from slime_like.config import RunConfig
from slime_like.errors import FAILED, INTERRUPTED, LaunchError, SlimeLikeError
from slime_like.launch.arguments import (
    devices_per_node,
    fresh_plan_path,
    plan_arguments,
    ray_spec,
    train_arguments,
    why_it_does_not_fit,
)
from slime_like.launch.cluster_key import create_key
from slime_like.launch.exit import failure
from slime_like.launch.exit_notes import Awaited, LastWords, NodeEndedError
from slime_like.launch.membership import Event, Lost, RollCall
from slime_like.launch.messages import Hello, Join, Joined, Look, Problem, Seen, Verdict
from slime_like.launch.options import LaunchOptions, Place
from slime_like.launch.progress import say
from slime_like.launch.ray_node import RayNode, ray_environment
from slime_like.launch.shared_directory import Witness
from slime_like.launch.subcommand import Child
from slime_like.launch.versions import installed_versions

_LEAVE_S = 60.0
_SETTLE_S = 3.0
_HEAR_S = 30.0
_LAST_WORDS_S = 10.0


def lead(
    options: LaunchOptions,
    config: RunConfig,
    place: Place,
    key_file: Path,
    words: LastWords,
    others: Mapping[int, Awaited],
) -> Verdict:
    """Lead the run to its end on all nodes, and give that.

    Args:
        words: left for nodes that this one never met.
        others: by rank, what nodes that do not come leave for this one.

    Raises:
        LaunchError: the key cannot be made, or the port is taken.
    """
    key = create_key(key_file)
    with RollCall(place.address, options.port, key, options.nodes, options.silence_s) as roll:
        way = _Lead(options, config, place, key_file, roll, others)
        with ExitStack() as stack:
            verdict = Verdict(FAILED, f"{place} ended without a word")
            try:
                verdict = way.run(stack)
            except NodeEndedError as ended:
                verdict = ended.verdict
            except SlimeLikeError as error:
                verdict = failure(error)
            except KeyboardInterrupt:
                verdict = Verdict(INTERRUPTED, f"interrupted on {place}")
            finally:
                if not roll.is_complete:
                    words.leave_or_complain(verdict)
                # The others first: a head that is gone would be the first thing they notice.
                roll.tell_all(verdict)
                roll.wait_until_gone(_LEAVE_S)
    return verdict


class _Lead:
    """Node 0's way through a run."""

    def __init__(
        self,
        options: LaunchOptions,
        config: RunConfig,
        place: Place,
        key_file: Path,
        roll: RollCall,
        others: Mapping[int, Awaited],
    ) -> None:
        self._options = options
        self._config = config
        self._place = place
        self._key_file = key_file
        self._roll = roll
        self._seen: set[str] = set()
        self._joined: set[str] = set()
        self._others = others
        self._witness = Path()

    def run(self, stack: ExitStack) -> Verdict:
        """Until training has ended."""
        options, place = self._options, self._place
        environment = ray_environment(self._key_file)
        self._witness = stack.enter_context(Witness(self._config.run_dir)).path
        say(place, f"awaiting {options.nodes - 1} more at {place.address}:{self._roll.port} ({place.interface})")
        if options.plan:
            verdict = self._plan(environment)
            if verdict.code:
                return verdict
        self._await_all()
        self._require_same_versions()
        spec = ray_spec(options, self._config, place, None)
        node = stack.enter_context(RayNode(spec, environment, options.ray_timeout_s))
        ready = node.wait_ready()
        say(place, f"Ray's head is up at {ready.gcs}, its logs in {ready.logs}")
        self._roll.tell_all(Join(ready.gcs))
        self._await_joined(node)
        say(place, f"all {options.nodes} nodes have joined; training")
        return self._run(train_arguments(options, ready.gcs), environment, node)

    def _plan(self, environment: Mapping[str, str]) -> Verdict:
        """Whether the run fits; why not is on standard output in full, and in the verdict in short."""
        output = fresh_plan_path(self._config)
        devices = devices_per_node(self._options, self._config)
        verdict = self._run(plan_arguments(self._options, devices, output), environment)
        if not verdict.code or not output.is_file():
            return verdict
        return Verdict(verdict.code, f"{self._place}, slime-like plan: {why_it_does_not_fit(output)}")

    def _run(self, arguments: list[str], environment: Mapping[str, str], node: RayNode | None = None) -> Verdict:
        """Run a command of ours while watching the nodes.

        Raises:
            LaunchError: a node was lost.
        """
        with Child(arguments, environment, self._options.stop_s) as child:
            try:
                code = child.wait(lambda: self._watch(child.command, node))
            except LaunchError:
                child.stop(_LAST_WORDS_S)  # what it would end in good order is gone
                raise
            if not code:
                return Verdict(0)
            if node is not None:  # perhaps because a node was lost, which says more
                self._settle(child.command, node)
            return Verdict(code if code > 0 else FAILED, f"{self._place}, {child.command}: {child.sentence()}")

    def _settle(self, command: str, node: RayNode) -> None:
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline:
            self._watch(command, node)

    def _watch(self, during: str, node: RayNode | None) -> None:
        """
        Raises:
            LaunchError: a node has a problem or was lost, this one included.
        """
        if node is not None and (problem := node.problem()):
            raise LaunchError(f"{self._place}, during `{during}`: {problem}")
        happened = self._roll.next_event(timeout_s=0.05)
        if happened is not None:
            self._note(*happened, during)

    def _note(self, name: str, event: Event, during: str) -> None:
        match event:
            case Hello():
                say(self._place, f"{name} is here")
                self._roll.tell(name, Look(str(self._witness)))
            case Seen():
                self._seen.add(name)
            case Joined():
                self._joined.add(name)
            case Problem():
                raise LaunchError(f"{name}: {event.sentence}")
            case Lost():
                raise LaunchError(
                    f"{name} was lost during `{during}`: {event.how}; started again, the run goes on from its last "
                    "checkpoint"
                )
            case _:
                raise LaunchError(f"{name} said {type(event).__name__}, which only node 0 says; is it node 0 as well?")

    def _await_all(self) -> None:
        deadline = time.monotonic() + self._options.nodes_timeout_s
        while len(self._seen) < self._options.nodes - 1:
            self._watch("start", None)
            missing = self._roll.missing()
            self._require_none_ended(missing)
            if not missing and time.monotonic() > deadline + _HEAR_S:
                blind = ", ".join(sorted(set(self._roll.hellos()) - self._seen))
                raise LaunchError(f"{blind}: no answer whether run_dir is seen there; does its file system hang?")
            if missing and time.monotonic() > deadline:
                away = f"; {self._roll.turned_away}" if self._roll.turned_away else ""
                raise LaunchError(
                    f"of {self._options.nodes} nodes, {_listed(missing)} did not come to {self._place} within "
                    f"{self._options.nodes_timeout_s:.0f} s{away}; start the same command there with its NODE_RANK"
                )

    def _require_none_ended(self, missing: list[int]) -> None:
        """
        Raises:
            NodeEndedError: one of them has left word that it will not come.
        """
        for rank in missing:
            self._others[rank].require_not_ended()

    def _require_same_versions(self) -> None:
        ours = installed_versions()
        for name, hello in self._roll.hellos().items():
            for package, own in ours.items():
                theirs = hello.versions.get(package, "")
                if theirs != own:
                    raise LaunchError(
                        f"{name} has {package} {theirs or '(none)'}, {self._place} has {own or '(none)'}; use one "
                        "environment, or one image, on all nodes"
                    )

    def _await_joined(self, node: RayNode) -> None:
        deadline = time.monotonic() + self._options.ray_timeout_s + _SETTLE_S
        while len(self._joined) < self._options.nodes - 1:
            self._watch("start of Ray", node)
            if time.monotonic() > deadline:
                late = ", ".join(sorted(set(self._roll.hellos()) - self._joined))
                raise LaunchError(f"{late}: Ray did not start there within {self._options.ray_timeout_s:.0f} s")


def _listed(ranks: list[int]) -> str:
    return ("node " if len(ranks) == 1 else "nodes ") + ", ".join(map(str, ranks))
