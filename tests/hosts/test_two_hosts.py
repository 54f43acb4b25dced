"""``scripts/run_qwen_32b.sh`` on two hosts with real addresses and a Ray node on each.

One pair of hosts and two starts serve all tests. The first start trains to its end over pipeline x context ranks, while
a stranger sends requests. The second one, with one rank per host, resumes with another engine and layout, and loses
a node.
"""

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from slime_like.data.ledger import audit_run
from tests.conftest import Tiny
from tests.end_to_end.test_train import steps_of
from tests.hosts.hosts import REPO, Host, Network, Running

PORT = 6380
TWO_RANKS_EACH = ("--trainer.parallel.pipeline", "2", "--trainer.parallel.context", "2")
ONE_RANK_EACH = ("--trainer.parallel.pipeline", "2")
SPANNING = ("--cluster.placement", "colocated", "--cluster.gpus_per_node", "1")
NOT_LOOKED_AT = ("--checkpoint.export_hf", "false", "--logging.tensorboard", "false")
RAYS_OWN = ("gcs_server", "raylet", "ray::", "python")  # the driver has a Ray server, too


def start(
    host: Host, rank: int, network: Network, tiny: Tiny, log: str, flags: tuple[str, ...] = (), **environment: str
) -> Running:
    """Start the script with a tiny configuration instead of the recipe."""
    run_dir = ("--run_dir", str(network.shared / "run")) if "--run_dir" not in flags else ()
    everything = tiny.rl_flags(Path("unused"), "--rollout.prompts_per_step", "4", "--evaluation.files", "[]")[4:]
    everything += ["--reward.start_timeout_s", "400", "--rollout.start_timeout_s", "400"]  # the machine may be busy
    variables = {
        "CONFIG": "configs/quickstart.yaml", "MODEL": str(network.shared / "model"), "PLAN": "0",
        "HEAD_ADDR": network.nodes[0].address, "NODE_ADDR": host.address, "NODES": "2", "NODE_RANK": str(rank),
        "OMP_NUM_THREADS": "1", **environment,
    }  # fmt: skip
    data = ("--model.path", variables["MODEL"], "--data.train", str(network.shared / "data" / "train.jsonl"))
    command = ["bash", "scripts/run_qwen_32b.sh", *everything, *NOT_LOOKED_AT, *data, *run_dir, *flags]
    return host.start(command, network.shared / f"{log}-{rank}.log", variables)


@dataclass
class Knocking:
    """Requests to node 0 while it trained.

    Attributes:
        listeners: address, port and process of every listener.
        answers: answers to a stranger by port, at the node's address in the cluster.
    """

    listeners: list[tuple[str, int, str]]
    answers: dict[str, list[str]]


@dataclass
class Trained:
    runs: list[Running]
    codes: list[int]
    knocking: Knocking
    left: list[list[str]]


@pytest.fixture(scope="module")
def trained(network: Network, tiny: Tiny) -> Trained:
    """Run the first start to its end."""
    flags = (*TWO_RANKS_EACH, "--checkpoint.every", "2")
    runs = [
        start(host, rank, network, tiny, "first", flags, ENGINE="transformers", PLAN="1")
        for rank, host in enumerate(network.nodes)
    ]
    runs[0].wait_for("step 1/", 240)
    knocking = knock(network)
    codes = [run.finish(120) for run in runs]
    return Trained(runs, codes, knocking, [left_on(host) for host in network.nodes])


def knock(network: Network) -> Knocking:
    """Send requests from the outsider."""
    listeners = network.nodes[0].listening()
    everywhere = [str(port) for address, port, _ in listeners if address == "*"]
    # gloo's ports need no key.
    own = [str(port) for address, port, who in listeners if address == "10.77.0.1" and "Train" not in who][:6]
    stranger = [sys.executable, "-m", "tests.hosts.stranger", "10.77.0.1", *everywhere, *own]
    answers = network.outsider.run(["env", "-C", str(REPO), *stranger], timeout_s=120)
    return Knocking(listeners, json.loads(answers))


def here(network: Network, node: int) -> str:
    """Return a node's name in messages."""
    return f"node {node} ({network.nodes[node].name}, {network.nodes[node].address})"


def left_on(host: Host, grace_s: float = 30.0) -> list[str]:
    """Return the command lines of processes that still run after a grace period."""
    deadline = time.monotonic() + grace_s
    while (left := host.processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [_command(process) for process in left]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:120]
    except psutil.NoSuchProcess:
        return "(ended)"


def test_the_script_trains_over_both_hosts(trained: Trained, network: Network) -> None:
    assert trained.codes == [0, 0], trained.runs[0].output + trained.runs[1].output
    assert f"{here(network, 1)} is here" in trained.runs[0].output
    assert "a plan" not in trained.runs[0].output
    assert "over gloo in" in trained.runs[0].output  # what `auto` is between hosts
    rows = steps_of(network.shared / "run")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert math.isfinite(row["train_actor_training/loss"]) and row["train_actor_training/grad_norm"] > 0
        assert row["weights/probe_gap"] < 1e-4 and row["train_actor_training/engine_gap_max"] < 1e-4
    written = network.shared / "run" / "checkpoints" / "latest" / "trainer"
    assert {path.name.split("_")[2] for path in written.glob("__*.distcp")} == set("0123")  # ranks of both hosts
    assert trained.left == [[], []]


def test_only_ray_listens_beyond_the_clusters_interface(trained: Trained) -> None:
    """Ray's servers can only listen on loopback or on every address."""
    for address, port, who in trained.knocking.listeners:
        assert address in ("10.77.0.1", "127.0.0.1", "*"), (address, port, who)
        if address == "*":
            assert who.startswith(RAYS_OWN), (port, who)


def test_a_stranger_who_is_routed_to_the_cluster_is_rejected(trained: Trained) -> None:
    """Ray's servers ask for the key, and nothing else serves a request without it."""
    knocking = trained.knocking
    everywhere = {str(port) for address, port, _ in knocking.listeners if address == "*"}
    assert len(everywhere) > 5 and str(PORT) in knocking.answers
    for port, answers in knocking.answers.items():
        assert not [answer for answer in answers if answer.startswith("OK")], (port, answers)
        if port in everywhere:
            assert "UNAUTHENTICATED" in answers, (port, answers)
            assert set(answers) <= {"UNAUTHENTICATED", "UNIMPLEMENTED", "no HTTP"}, (port, answers)


HALVES = {"sglang": ("--rollout.tensor", "2"), "vllm": ("--rollout.pipeline", "2")}


@pytest.mark.acceptance
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("engine", "rank"), [("sglang", "sglang::scheduler"), ("vllm", "VLLM::Worker")])
def test_half_of_an_engine_dies(trained: Trained, network: Network, tiny: Tiny, engine: str, rank: str) -> None:
    """The other half ends, both are started again, and the run goes on with the weights of its last step."""
    run_dir, name = network.shared / f"halves-{engine}", f"halves-{engine}"
    flags = (*ONE_RANK_EACH, *SPANNING, *HALVES[engine], "--run_dir", str(run_dir), "--steps", "20")
    runs = [start(host, i, network, tiny, name, flags, ENGINE=engine) for i, host in enumerate(network.nodes)]
    runs[0].wait_for("step 1/", 300)
    killed, other = ([one for one in host.processes() if rank in _command(one)] for host in network.nodes[::-1])
    assert len(killed) == len(other) == 1, [list(map(_command, host.processes())) for host in network.nodes]
    killed[0].kill()
    assert [run.finish(300) for run in runs] == [0, 0], runs[0].output + runs[1].output
    assert f"engine 0 ({engine}) was restarted" in runs[0].output
    assert not other[0].is_running()
    rows = steps_of(run_dir)
    assert [row["step"] for row in rows] == [*range(1, 21)]
    for row in rows:
        assert row["weights/probe_gap"] < 1e-4 and row["train_actor_training/engine_gap_max"] < 1e-4
    assert not audit_run(run_dir).problems  # every prompt was trained once
    assert [left_on(host) for host in network.nodes] == [[], []]


@dataclass
class LostNode:
    run: Running
    code: int
    seconds: float
    left: list[str]


@pytest.fixture(scope="module")
def lost(trained: Trained, network: Network, tiny: Tiny) -> LostNode:
    """Run the second start, with an SGLang engine over both nodes, until node 1 loses its power."""
    flags = (*ONE_RANK_EACH, *SPANNING, *HALVES["sglang"], "--steps", "1000", "--checkpoint.every", "0")
    variables = {"ENGINE": "sglang", "SILENCE_S": "12"}
    runs = [start(host, rank, network, tiny, "second", flags, **variables) for rank, host in enumerate(network.nodes)]
    runs[0].wait_for("step 3/", 240)
    network.nodes[1].power_off()
    began = time.monotonic()
    code = runs[0].finish(150)
    return LostNode(runs[0], code, time.monotonic() - began, left_on(network.nodes[0]))


def test_a_second_start_resumes_with_another_engine_and_layout(lost: LostNode, network: Network) -> None:
    assert "step-000002 after step 2" in lost.run.output
    assert "rollout.engine: transformers -> sglang" in lost.run.output
    assert "cluster.placement: separate -> colocated" in lost.run.output
    rows = steps_of(network.shared / "run")
    assert [row["step"] for row in rows][:3] == [1, 2, 3]
    for row in rows:
        assert row["weights/probe_gap"] < 1e-4 and row["train_actor_training/engine_gap_max"] < 1e-4


def test_a_node_that_dies_ends_the_run_with_its_name(lost: LostNode, network: Network) -> None:
    """The bound is the silence, then the time for training to stop."""
    assert lost.code == 1
    assert lost.run.last_line.startswith(f"slime-like: {here(network, 1)} was lost during `slime-like train`: ")
    assert lost.seconds < 90
    assert lost.left == []
