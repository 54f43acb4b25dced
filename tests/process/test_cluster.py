"""A real Ray cluster: placement, token, failed starts, and daemons that die or stop."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import ray
from ray._private import services

from slime_like.config import ClusterConfig
from slime_like.errors import SlimeLikeError
from slime_like.orchestration.cluster import cluster, lean_node, stopped
from slime_like.orchestration.cluster.cluster import Cluster, orphan_reaper
from slime_like.orchestration.cluster.placement import Placement
from slime_like.system.interrupts import InterruptHandler
from tests.support.rejections import Rejects
from tests.unit.orchestration.cluster.test_bundles import config


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InterruptHandler]:
    """Signal handler of the command, without a guard, since nothing is started."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "files"))
    monkeypatch.setattr(orphan_reaper, "start", lambda *_: subprocess.Popen(["cat"], stdin=subprocess.PIPE))
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # restored at the end, like the signals' handlers
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handler = InterruptHandler()
    handler.install()
    yield handler
    for number, usual in before.items():
        signal.signal(number, usual)


@pytest.mark.parametrize("how", ["fails", "swallows Ctrl-C"])
def test_ray_that_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: InterruptHandler, how: str, rejects: Rejects
) -> None:
    """Ray's handler of SIGTERM is never installed."""
    found: list[Any] = []

    def init(**_: Any) -> None:
        ray._private.utils.set_sigterm_handler(signal.SIG_IGN)  # like ``ray.init``
        found.append(signal.getsignal(signal.SIGTERM))
        handler.noted = how == "swallows Ctrl-C"
        raise Exception("The current node timed out during startup")  # the class that Ray raises then

    monkeypatch.setattr(ray, "init", init)
    kind, code = (SlimeLikeError, "ray-not-started") if how == "fails" else (KeyboardInterrupt, None)
    with rejects(kind, code):
        Cluster(ClusterConfig(), tmp_path / "logs", 1).__enter__()
    assert found == [handler]


def test_an_object_store_larger_than_memory_is_rejected_with_the_setting(tmp_path: Path) -> None:
    more = 2 * psutil.virtual_memory().total // 2**20
    starting = Cluster(ClusterConfig(object_store_mb=more), tmp_path / "logs", 1)
    with pytest.raises(SlimeLikeError) as caught:
        starting.__enter__()
    assert caught.value.code == "ray-not-started" and "lower cluster.object_store_mb" in caught.value.problem
    assert starting._guard.wait(60) == 0


@pytest.mark.parametrize("listens", [True, False])
def test_a_cluster_that_does_not_answer_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: InterruptHandler, listens: bool, rejects: Rejects
) -> None:
    """Ray would try forever."""
    monkeypatch.setattr(cluster, "_ANSWER_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{silent.getsockname()[1]}")
        if not listens:
            silent.close()
        with rejects(SlimeLikeError, "cluster-silent"):
            Cluster(ClusterConfig(address="auto"), tmp_path / "logs", 1).__enter__()


def test_a_cluster_is_private_and_places_what_fits(tmp_path: Path, rejects: Rejects) -> None:
    """A run that needs more devices than the cluster has is rejected immediately."""
    references = {"placement": "workers", "workers": 2}
    fits = config(tmp_path, trainer={"parallel": {"data": 3}}, reference=references, algorithm={"kl": {"coef": 0.1}})
    larger = config(tmp_path, trainer={"parallel": {"data": 300}})
    fits.run_dir.mkdir()
    with Cluster(fits.cluster, fits.run_dir / "worker_logs", slots=6):
        private = (fits.run_dir / "worker_logs").readlink().parent.parent.parent
        assert private.stat().st_mode & 0o777 == 0o700
        token = private / "token"
        assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(token) and token.stat().st_mode & 0o777 == 0o600
        assert _answered_with("wrong" * 10) == "AuthenticationError" and _answered_with(token.read_text()) == "answered"
        for _ in range(2):  # the second one needs devices that the first one released
            with Placement(fits) as placement:
                assert placement.device == "CPU" and placement.num_nodes == 1
                assert [placement.ranks_on_node(rank) for rank in range(3)] == [3, 3, 3]
                assert [placement.ranks_on_node(0, worker) for worker in range(2)] == [2, 2]
                strategies = [placement.rank_options(rank)["scheduling_strategy"] for rank in range(3)]
                strategies.append(placement.engine_options(0)["scheduling_strategy"])
                strategies += [placement.rank_options(0, i)["scheduling_strategy"] for i in range(2)]
                assert [strategy.placement_group_bundle_index for strategy in strategies] == [0, 1, 2, 3, 4, 5]
        with rejects(SlimeLikeError, "too-few-devices"):
            Placement(larger).__enter__()
    assert not ray.is_initialized() and not private.exists()
    logs = list((fits.run_dir / "worker_logs").rglob("*"))
    assert logs and not [path for path in logs if path.stat().st_mode & 0o022]


def _answered_with(token: str) -> str:
    """Return how the GCS answers a process that has this token."""
    program = (
        "import sys\nfrom ray._raylet import GcsClient\n"
        "try:\n    print('answered' if GcsClient(address=sys.argv[1]).get_all_node_info(5) else 'none')\n"
        "except Exception as error:\n    print(type(error).__name__)"
    )
    address = ray.get_runtime_context().gcs_address
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    command = [sys.executable, "-c", program, address]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90).stdout.strip()


def test_a_failure_after_the_death_of_a_daemon_names_the_daemon(tmp_path: Path) -> None:
    """A raylet ends with its agent. The driver's error is a consequence."""
    with pytest.raises(SlimeLikeError) as caught, Cluster(ClusterConfig(), tmp_path / "logs", slots=1):
        raylet = _child("raylet")
        agents = [child for child in raylet.children() if "RuntimeEnvAgent" in " ".join(child.cmdline())]
        agents[0].kill()
        raylet.wait(30)
        raise SlimeLikeError("a call was lost", code="lost")
    assert caught.value.code == "ray-died" and caught.value.who == "cluster"
    assert "raylet" in caught.value.problem and "runtime_env_agent" in caught.value.problem
    assert "a call was lost" in caught.value.problem


def test_a_daemon_that_dies_while_ray_starts_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = services.start_gcs_server

    def start_and_kill(*arguments: Any, **options: Any) -> Any:
        started = start(*arguments, **options)
        started.process.kill()
        return started

    monkeypatch.setattr(services, "start_gcs_server", start_and_kill)
    monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "2")
    starting = Cluster(ClusterConfig(), tmp_path / "logs", slots=1)
    with pytest.raises(SlimeLikeError) as caught:
        starting.__enter__()
    assert caught.value.code == "ray-not-started" and "gcs_server ended by itself with -9" in caught.value.problem
    assert starting._guard.wait(60) == 0  # it ends processes that Ray's failed start left


def _child(name: str) -> psutil.Process:
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # ended since it was listed
            found += [child] if child.name() == name else []
    (one,) = found
    return one


def test_a_stopped_daemon_interrupts_any_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver does not wait for Ray here, so nothing else fails.

    The process ignores SIGINT, like one that a script starts in the background. It keeps ignoring others' SIGINT.
    """
    # Also reset the others: an earlier test may have left an ``InterruptHandler``.
    given = {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    usual = {number: signal.signal(number, handler) for number, handler in given.items()}
    monkeypatch.setattr(stopped, "END_AFTER_S", 1.5)
    monkeypatch.setattr(lean_node, "_FAILS_BEFORE_S", 0.0)  # like on a busy machine
    notes: list[str] = []
    try:
        with (
            pytest.raises(SlimeLikeError) as caught,
            Cluster(ClusterConfig(), tmp_path / "logs", slots=1, note=notes.append),
        ):
            _child("raylet").suspend()
            os.kill(os.getpid(), signal.SIGINT)  # ignored
            time.sleep(120)
            raise AssertionError("the run was not interrupted")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    assert caught.value.code == "ray-died" and "raylet" in caught.value.problem
    assert "was ended" in caught.value.problem and len(notes) == 1 and "of Ray's raylet" in notes[0]
