"""The nodes of a run. Node 0 starts Ray's head, waits for the others, trains, and passes the verdict on to them.

Every other node finds node 0, compares itself with it, joins its Ray, and stays until the run has ended.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import Any

from slime_like.checks.check import require_valid
from slime_like.config import RunConfig
from slime_like.config.reading.fields import all_fields, value_text
from slime_like.errors import FAILED, INTERRUPTED, LaunchError, SlimeLikeError
from slime_like.interfaces.engine_limits import engine_limits
from slime_like.launch.commands import (
    ExitNotes,
    LaunchOptions,
    NodeEndedError,
    RefusedError,
    RunVerdict,
    failure,
    run_command,
    run_plan,
    train_arguments,
)
from slime_like.orchestration.cluster.bundles import pieces_of, slots_per_node
from slime_like.orchestration.cluster.gcs import Gcs, UnreachableError, WrongTokenError
from slime_like.orchestration.cluster.node import Place, find_place
from slime_like.orchestration.cluster.ray_node import RayNode, node_parameters, ray_environment
from slime_like.orchestration.cluster.ray_session import await_token, create_token
from slime_like.plugins.resolve import ENGINE_GROUP, installed_names
from slime_like.system.interrupts import polls, raise_if_interrupted, take_interrupt
from slime_like.system.network import host_and_port, listen

_LEAVE_S = 60.0
_LINGER_S = 1.0
_SETTLE_S = 5.0
_POLL_S, _FOLLOW_EVERY_S = 0.25, 0.5
_REMEDY = "restart to resume from the last checkpoint"
_HEAR_S = 30.0
_LOST = "node-lost"
_PER_NODE = ("cluster.address", "cluster.object_store_mb")
_DISTRIBUTIONS = (
    *("slime-like", "torch", "ray", "megatron-core", "numpy", "transformer-engine", "flash-attn"),
    *(package for engine in installed_names(ENGINE_GROUP) for package in engine_limits(engine).packages),
)


Layout = tuple[LaunchOptions, RunConfig]


def launch(options: LaunchOptions, config: RunConfig, fallbacks: Sequence[Layout] = ()) -> RunVerdict:
    """Take part in a run on ``options.nodes`` nodes until it has ended on all of them.

    ``fallbacks``: smaller layouts, the first of which that fits is used if some nodes do not come.

    Raises:
        SlimeLikeError: a failure before Ray connected this node. The other nodes find the reason in its exit note.
    """
    if options.nodes == 1:  # training starts Ray on loopback
        require_valid(config)
        verdict = run_plan(options, config.run_dir, os.environ)
        if not verdict.code:
            verdict = run_command(train_arguments(options, None), os.environ, options.stop_s)
        return verdict
    notes, here = ExitNotes(config.run_dir, options), f"node {options.node_rank} ({socket.gethostname()})"
    try:
        role = lead if options.node_rank == 0 else follow
        return role(options, config, notes, fallbacks)
    except NodeEndedError as ended:
        return ended.verdict
    except RefusedError:
        raise
    except Exception as error:
        notes.leave(failure(error, "" if isinstance(error, SlimeLikeError) else here))
        raise
    except KeyboardInterrupt:
        take_interrupt()
        notes.leave(RunVerdict(FAILED, f"interrupted on {here}", _LOST))
        return RunVerdict(INTERRUPTED, f"interrupted on {here}")


def lead(options: LaunchOptions, config: RunConfig, notes: ExitNotes, fallbacks: Sequence[Layout] = ()) -> RunVerdict:
    """Lead the run to its end on all nodes.

    Raises ``SlimeLikeError`` if Ray's head did not start. The other nodes need an exit note.
    """
    for layout in (config, *(smaller for _, smaller in fallbacks)):
        require_valid(layout)
    place = find_place(0, options.head, options.address)
    token = create_token(options.token_path(config.run_dir))
    _require_free(place.address, options.port)
    environment = ray_environment(options.token_path(config.run_dir), options.silence_s)
    for planned in (options, *(smaller for smaller, _ in fallbacks)):
        verdict = _name_place(place, run_plan(planned, config.run_dir, environment))
        if verdict.code:
            notes.leave(verdict)
            return verdict
    slots = _slots((options, config), *fallbacks)
    parameters = node_parameters(slots, config.cluster.object_store_mb, place, None, options.port)
    with RayNode(parameters, environment, options.ray_timeout_s) as node:
        node.wait_ready()
        address = host_and_port(place.address, options.port)
        place.report(f"Ray's head is up at {address}, its logs in {node.directory}")
        gcs = Gcs(address, token, options.silence_s)
        members = _Members(place, options.nodes, gcs, node)
        try:
            gcs.put_new("agreement", {"head": str(place), "nodes": options.nodes, "facts": facts(config)})
            options = members.choose_layout(options, [smaller for smaller, _ in fallbacks], notes)
            arguments = train_arguments(options, address)
            verdict = _name_place(place, run_command(arguments, environment, options.stop_s, members.require_alive))
            if verdict.code:
                for _ in polls(_POLL_S, _SETTLE_S):  # the loss of a node explains more than its consequences
                    members.require_alive()
        except SlimeLikeError as error:
            verdict = failure(error)
        except KeyboardInterrupt:
            take_interrupt()
            verdict = RunVerdict(INTERRUPTED, f"interrupted on {place}")
        if not members.dismiss(verdict):
            notes.leave(verdict)
    return verdict


def _slots(*layouts: Layout) -> int:
    """Return the CPU slots that every node offers: enough for each layout."""
    sizes = ((pieces_of(config), config.trainer.parallel.tensor, options.nodes) for options, config in layouts)
    return max(slots_per_node(*size) for size in sizes)


def _require_free(address: str, port: int) -> None:
    try:
        listen(address, port).close()
    except OSError as error:
        problem = f"cannot listen on port {port} of {address} ({error.strerror})"
        remedy = "end the process that uses it, or give another PORT to every node"
        raise LaunchError(problem, code="port-taken", remedy=remedy) from error


def _name_place(place: Place, verdict: RunVerdict) -> RunVerdict:
    return replace(verdict, sentence=f"{place}, {verdict.sentence}" if verdict.code else "")


class _Members:
    """Nodes of the run, as Ray's GCS lists them."""

    def __init__(self, place: Place, nodes: int, gcs: Gcs, node: RayNode) -> None:
        self._place = place
        self._missing = set(range(1, nodes))
        self._gcs = gcs
        self._node = node
        self._during = "start"
        self._checked_at = 0.0

    def choose_layout(
        self, options: LaunchOptions, fallbacks: Sequence[LaunchOptions], notes: ExitNotes
    ) -> LaunchOptions:
        """Wait for all nodes, and return the options of the layout to train in: the first that fits those that came.

        Raises ``LaunchError`` like ``wait_for_all`` if none fits.
        """
        try:
            self.wait_for_all(options.nodes_timeout_s, notes)
        except LaunchError as error:
            there = options.nodes - len(self._missing)
            smaller = next((one for one in fallbacks if one.nodes <= there), None)
            if error.code != "node-missing" or smaller is None:
                raise
            self._during = "slime-like train"
            self._place.report(f"{error.problem}; training on {smaller.nodes} nodes (cluster.fallback_layouts)")
            return smaller
        return options

    def wait_for_all(self, timeout_s: float, notes: ExitNotes) -> None:
        """Wait for all nodes to join. Raise ``LaunchError`` if a node ends before that, or does not join in time."""
        nodes = len(self._missing) + 1
        self._place.report(f"waiting for {nodes - 1} more ({self._place.interface})")
        for _ in polls(_POLL_S, timeout_s):
            self.require_alive()
            notes.require_none_ended(self._missing)
            if not self._missing:
                self._during = "slime-like train"
                self._place.report(f"all {nodes} nodes have joined; training")
                return
        missing = ("node " if len(self._missing) == 1 else "nodes ") + ", ".join(map(str, self._missing))
        away = f"of {nodes} nodes, {missing} did not come to {self._place} within {timeout_s:.0f} s"
        raise LaunchError(away, code="node-missing", remedy="start the same command there with its NODE_RANK")

    def require_alive(self) -> None:
        """Raise ``LaunchError`` if a node, including this one, has ended the run or was lost."""
        if time.monotonic() < self._checked_at + _POLL_S:
            return
        self._checked_at = time.monotonic()
        try:
            members = self._gcs.members()  # first: a node that leaves has reported its problem by then
            problem = self._gcs.get("problem")
        except UnreachableError as error:
            why = self._node.problem() or f"Ray's GCS does not answer ({error}), though it runs here"
            raise self._ray_ended(why) from error
        if fault := self._node.problem():
            raise self._ray_ended(fault)
        if problem:
            raise NodeEndedError(RunVerdict(**problem))
        for rank, member in sorted(members.items(), reverse=True):  # node 0 last: it may be the one that is cut off
            if not member.alive:
                raise LaunchError(
                    f"{member.name} was lost during `{self._during}`: {member.end}", code=_LOST, remedy=_REMEDY
                )
            if rank in self._missing:
                self._place.report(f"{member.name} is here")
                self._missing.remove(rank)

    def _ray_ended(self, why: str) -> LaunchError:
        phase = f"during `{self._during}`"
        return LaunchError(why, code="ray-ended", who=str(self._place), phase=phase, remedy=_REMEDY)

    def dismiss(self, verdict: RunVerdict) -> bool:
        """Publish the verdict, and wait until the other nodes have left Ray. Return whether it reached all of them."""
        with suppress(UnreachableError):
            self._gcs.put_new("verdict", asdict(verdict))
            time.sleep(_LINGER_S)  # nodes that have not joined read it, too
            for _ in polls(_POLL_S, _LEAVE_S):
                if not any(member.alive for rank, member in self._gcs.members().items() if rank):
                    return not self._missing
        return False


def follow(options: LaunchOptions, config: RunConfig, notes: ExitNotes, fallbacks: Sequence[Layout] = ()) -> RunVerdict:
    """Take part until node 0 publishes the verdict, or is lost.

    Raises:
        SlimeLikeError: node 0 was not found. It needs an exit note.
        RefusedError: the run has no place for this node.
    """
    place = find_place(options.node_rank, options.head, options.address)
    deadline = time.monotonic() + options.nodes_timeout_s
    token = await_token(options.token_path(config.run_dir), options.nodes_timeout_s, notes.require_none_ended)
    where = host_and_port(place.head, options.port)
    agreement = _find_head(where, token, place, max(1.0, deadline - time.monotonic()), notes)
    head = _Head(Gcs(where, token, options.silence_s), place, notes)
    head.claim_rank(agreement["nodes"])
    place.report(f"reported to node 0 at {where} from {place.address} ({place.interface})")
    with ExitStack() as stack:  # Ray stays here until node 0 has ended training in good order
        try:
            for layout in (config, *(smaller for _, smaller in fallbacks)):
                require_valid(layout)  # every node checks: paths may exist on one and not on another
            require_equal(facts(config), agreement["head"], agreement["facts"])
            environment = ray_environment(options.token_path(config.run_dir), options.silence_s)
            slots = _slots((options, config), *fallbacks)
            parameters = node_parameters(slots, config.cluster.object_store_mb, place, where, options.port)
            node = stack.enter_context(RayNode(parameters, environment, options.ray_timeout_s))
            node.wait_ready(head.require_runs)
            place.report(f"joined Ray's head at {where}, logs in {node.directory}")
            while (problem := node.problem()) is None:
                head.require_runs()
                time.sleep(_FOLLOW_EVERY_S)
            raise LaunchError(problem, code="ray-ended")
        except NodeEndedError:
            raise
        except SlimeLikeError as error:
            verdict = failure(error, str(place))
            head.end_run(verdict)
        except KeyboardInterrupt:
            take_interrupt()
            verdict = RunVerdict(INTERRUPTED, f"interrupted on {place}")
            head.end_run(RunVerdict(FAILED, f"{place}: interrupted there", _LOST))
    return verdict


def _find_head(where: str, token: str, place: Place, timeout_s: float, notes: ExitNotes) -> dict[str, Any]:
    """Return node 0's agreement. Raise ``LaunchError`` if it does not answer in time, has ended, or rejects the key."""
    gcs, why = Gcs(where, token, silence_s=0.0), "Ray's head is starting"
    for _ in polls(_FOLLOW_EVERY_S, timeout_s):
        try:
            if found := gcs.get("agreement"):
                agreement: dict[str, Any] = found
                return agreement
        except UnreachableError as error:
            why = str(error)
        except WrongTokenError as error:
            problem = f"{where} answers, but does not accept this node's key"
            remedy = "give every node the same TOKEN_FILE, or another PORT if another cluster uses this one"
            raise LaunchError(problem, code="wrong-token", who=str(place), remedy=remedy) from error
        notes.require_none_ended()
    problem = f"node 0 did not answer at {where} within {timeout_s:.0f} s ({why})"
    raise LaunchError(problem, code="head-silent", remedy="check HEAD_ADDR, and whether node 0 was started there")


def facts(config: RunConfig) -> dict[str, str]:
    """Return the settings by field, except those of a single node, and the versions by distribution."""
    found = {name: value_text(attrgetter(name)(config)) for name in all_fields() if name not in _PER_NODE}
    for name in _DISTRIBUTIONS:
        found[name] = "(none)"
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def require_equal(found: Mapping[str, str], head: str, expected: Mapping[str, str]) -> None:
    """Check that this node's facts equal ``expected``, the facts of node 0.

    Raises ``LaunchError`` if a version or setting differs.
    """
    for name in sorted({*found, *expected}):
        here, there = found.get(name, "(none)"), expected.get(name, "(none)")
        if here != there:
            remedy = "use one environment or image" if name in _DISTRIBUTIONS else "give the same settings"
            who, remedy = f"{name}={here}", f"{remedy} on all nodes"
            raise LaunchError(f"{head} has {there}", code="nodes-differ", who=who, remedy=remedy)


class _Head:
    """Node 0, through its GCS. Each method raises ``NodeEndedError`` if node 0 is lost."""

    def __init__(self, gcs: Gcs, place: Place, notes: ExitNotes) -> None:
        self._gcs = gcs
        self._place = place
        self._notes = notes

    def claim_rank(self, nodes: int) -> None:
        """Claim this node's rank. Raise ``RefusedError`` if the rank is taken, or there is no such rank."""
        rank, reason = self._place.rank, f"with NODES={nodes} it must be 1 to {nodes - 1}"
        if rank < nodes:
            if self._ask(lambda: self._gcs.put_new(f"rank-{rank}", str(self._place))):
                return
            reason = f"{self._ask(lambda: self._gcs.get(f'rank-{rank}'))} has it already"
        raise RefusedError(f"NODE_RANK={rank} on {self._place.host} is rejected: {reason}")

    def require_runs(self) -> None:
        """Raise ``NodeEndedError`` if node 0 has published the verdict."""
        raise_if_interrupted()
        if verdict := self._ask(lambda: self._gcs.get("verdict")):
            raise NodeEndedError(RunVerdict(**verdict))

    def end_run(self, verdict: RunVerdict) -> None:
        """Report why this node ends, and wait until node 0 has published its verdict or has ended."""
        with suppress(NodeEndedError):
            self._ask(lambda: self._gcs.put_new("problem", asdict(verdict)))
            for _ in polls(_FOLLOW_EVERY_S, _HEAR_S):
                self.require_runs()

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except UnreachableError as error:
            self._notes.require_none_ended()
            how = f"its connection ended ({error})" if error.refused else f"it is silent ({error})"
            lost = f"{self._place} has lost node 0 ({self._place.head}): {how}"
            remedy = "restart on all nodes to resume from the last checkpoint"
            raise NodeEndedError(RunVerdict(FAILED, f"{lost}; {remedy}", _LOST)) from error
