"""Node 0: start Ray's head, wait for the other nodes, train, and pass the verdict on to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict

from slime_like.checks.check import require_valid
from slime_like.config import RunConfig
from slime_like.errors import FAILED, INTERRUPTED, LaunchError, SlimeLikeError
from slime_like.launch.agreement import Agreement, facts
from slime_like.launch.arguments import (
    plan_arguments,
    plan_path,
    ray_spec,
    remove_plan,
    train_arguments,
    why_it_does_not_fit,
)
from slime_like.launch.directory import marker, token_path
from slime_like.launch.exit import NodeEndedError, Verdict, failure
from slime_like.launch.exit_notes import ExitNotes
from slime_like.launch.options import LaunchOptions
from slime_like.orchestration.cluster.gcs import Gcs, UnreachableError
from slime_like.orchestration.cluster.place import Place, find_place
from slime_like.orchestration.cluster.ray_node import RayNode, ray_environment
from slime_like.orchestration.cluster.token import create_token
from slime_like.system.interrupts import raise_if_interrupted, take_interrupt
from slime_like.system.network import listen
from slime_like.system.subcommand import Child

_LEAVE_S = 60.0
_LINGER_S = 1.0
_SETTLE_S = 5.0
_STOP_S = 10.0
_POLL_S = 0.25


def lead(options: LaunchOptions, config: RunConfig, notes: ExitNotes) -> Verdict:
    """Lead the run to its end on all nodes.

    Raises:
        SlimeLikeError: before Ray's head was up; the other nodes need an exit note.
    """
    require_valid(config)
    place = find_place(0, options.head, options.address)
    token_file = token_path(options, config)
    token = create_token(token_file)
    _require_free(place.address, options.port)
    environment = ray_environment(token_file, options.silence_s)
    if options.plan:
        _plan(options, config, place, environment)
    spec = ray_spec(options, config, place, None)
    with marker(config.run_dir) as path, RayNode(spec, environment, options.ray_timeout_s) as node:
        ready = node.wait_ready()
        gcs = Gcs(ready.gcs, token, options.silence_s)
        gcs.put_new("agreement", asdict(Agreement(str(place), options.nodes, str(path), facts(config))))
        members = _Members(options, place, gcs, node)
        place.report(f"Ray's head is up at {ready.gcs}, its logs in {ready.logs}")
        place.report(f"awaiting {options.nodes - 1} more at {ready.gcs} ({place.interface})")
        try:
            members.wait_for_all(notes)
            place.report(f"all {options.nodes} nodes have joined; training")
            verdict = _run(train_arguments(options, ready.gcs), environment, options, place, members.watch)
            if verdict.code:
                members.settle("slime-like train")
        except SlimeLikeError as error:
            verdict = failure(error)
        except KeyboardInterrupt:
            take_interrupt()
            verdict = Verdict(INTERRUPTED, f"interrupted on {place}")
        if not members.dismiss(verdict):
            notes.leave(verdict)
    return verdict


def _require_free(address: str, port: int) -> None:
    try:
        listen(address, port).close()
    except OSError as error:
        raise LaunchError(
            f"port {port} of {address} cannot be listened on ({error.strerror}); end what uses it, or give another "
            "PORT to every node"
        ) from error


def _plan(options: LaunchOptions, config: RunConfig, place: Place, environment: Mapping[str, str]) -> None:
    """
    Raises:
        NodeEndedError: the run does not fit; the reasons are on standard output in full.
    """
    remove_plan(config)
    verdict = _run(plan_arguments(options, config), environment, options, place, lambda during: None)
    if verdict.code and plan_path(config).is_file():
        verdict = Verdict(verdict.code, f"{place}, slime-like plan: {why_it_does_not_fit(plan_path(config))}")
    if verdict.code:
        raise NodeEndedError(verdict)


def _run(
    arguments: list[str],
    environment: Mapping[str, str],
    options: LaunchOptions,
    place: Place,
    watch: Callable[[str], None],
) -> Verdict:
    """Run a command of ours; ``watch`` is called meanwhile with its name, and what it raises ends it."""
    with Child(arguments, environment, options.stop_s) as child:
        try:
            code = child.wait(lambda: watch(child.command))
        except LaunchError:
            child.stop(_STOP_S)  # a part of the run is gone, so that it cannot end in good order
            raise
        return Verdict(code if code >= 0 else FAILED, f"{place}, {child.command}: {child.sentence()}" if code else "")


class _Members:
    """The other nodes, as Ray's GCS lists them."""

    def __init__(self, options: LaunchOptions, place: Place, gcs: Gcs, node: RayNode) -> None:
        self._options = options
        self._place = place
        self._gcs = gcs
        self._node = node
        self._joined: set[int] = set()

    def wait_for_all(self, notes: ExitNotes) -> None:
        """
        Raises:
            LaunchError: a node has ended, or did not join in time.
        """
        deadline = time.monotonic() + self._options.nodes_timeout_s
        while missing := sorted({*range(1, self._options.nodes)} - self._joined):
            raise_if_interrupted()
            self.watch("start")
            notes.require_none_ended(missing)
            if time.monotonic() > deadline:
                listed = ("node " if len(missing) == 1 else "nodes ") + ", ".join(map(str, missing))
                raise LaunchError(
                    f"of {self._options.nodes} nodes, {listed} did not come to {self._place} within "
                    f"{self._options.nodes_timeout_s:.0f} s; start the same command there with its NODE_RANK"
                )
            time.sleep(_POLL_S)

    def watch(self, during: str) -> None:
        """
        Raises:
            LaunchError: a node has ended the run or was lost, this one included.
        """
        try:
            members = self._gcs.members()  # first: a node that leaves has reported its problem by then
            problem = self._gcs.get("problem")
        except UnreachableError as error:
            why = self._node.problem() or f"Ray's GCS does not answer: {error}"
            raise LaunchError(f"{self._place}, during `{during}`: {why}") from error
        if own := self._node.problem():
            raise LaunchError(f"{self._place}, during `{during}`: {own}")
        if problem:
            raise NodeEndedError(Verdict(**problem))
        for rank, member in members.items():
            if not member.alive:
                raise LaunchError(
                    f"{member.name} was lost during `{during}`: {member.end}; restart to resume from the last "
                    "checkpoint"
                )
            if rank and rank not in self._joined:
                self._place.report(f"{member.name} is here")
                self._joined.add(rank)

    def settle(self, during: str) -> None:
        """Watch for a moment more: a node that is lost is a better cause than what its loss has caused."""
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline:
            self.watch(during)
            time.sleep(_POLL_S)

    def dismiss(self, verdict: Verdict) -> bool:
        """Publish the verdict and wait until the other nodes have left Ray; whether it reached all of them."""
        deadline = time.monotonic() + _LEAVE_S
        try:
            self._gcs.put_new("verdict", asdict(verdict))
            time.sleep(_LINGER_S)  # nodes that have not joined read it, too
            while any(member.alive for rank, member in self._gcs.members().items() if rank):
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_S)
        except UnreachableError:
            return False
        return len(self._joined) == self._options.nodes - 1
