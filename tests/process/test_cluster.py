"""A Ray that does not start is one sentence, an interrupt that it swallowed none; placement on a real cluster."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import ray
from ray._private import services

from slime_like.config import ClusterConfig
from slime_like.errors import SlimeLikeError
from slime_like.orchestration.cluster import cluster, daemons, stopped
from slime_like.orchestration.cluster.cluster import Cluster, orphan_reaper
from slime_like.orchestration.cluster.placement import Placement
from slime_like.orchestration.cluster.ray_node import RayNodeSpec
from slime_like.system.interrupts import InterruptHandler
from tests.support.rejections import Rejects
from tests.unit.orchestration.cluster.test_bundles import config


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InterruptHandler]:
    """Nothing is started, so that there is nothing to guard; signals as in the command."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "files"))
    monkeypatch.setattr(orphan_reaper, "start", lambda *_: subprocess.Popen(["cat"], stdin=subprocess.PIPE))
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # restored at the end, as the signals' handlers
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handler = InterruptHandler()
    signal.signal(signal.SIGINT, handler)
    yield handler
    for number, usual in before.items():
        signal.signal(number, usual)


@pytest.mark.parametrize("how", ["fails", "swallows Ctrl-C"])
def test_ray_that_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: InterruptHandler, how: str, rejects: Rejects
) -> None:
    def init(**_: Any) -> None:
        handler.noted = how == "swallows Ctrl-C"
        raise Exception("The current node timed out during startup")  # the class that Ray raises then

    monkeypatch.setattr(ray, "init", init)
    kind, code = (SlimeLikeError, "ray-not-started") if how == "fails" else (KeyboardInterrupt, None)
    with rejects(kind, code):
        Cluster(ClusterConfig(), tmp_path / "logs", 1).__enter__()


def test_ray_leaves_the_drivers_handler_of_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: InterruptHandler
) -> None:
    handler.install()
    found: list[Any] = []

    def init(**_: Any) -> None:
        ray._private.utils.set_sigterm_handler(signal.SIG_IGN)  # as ``ray.init`` does
        found.append(signal.getsignal(signal.SIGTERM))
        raise Exception("ends here")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(SlimeLikeError):
        Cluster(ClusterConfig(), tmp_path / "logs", 1).__enter__()
    assert found == [handler]


def test_a_store_that_the_machine_has_no_room_for_is_refused_before_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: InterruptHandler
) -> None:
    """What an earlier start left stays where it is."""
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "init", lambda **arguments: started.append(arguments))
    (tmp_path / "logs").mkdir()
    more = 2 * psutil.virtual_memory().total // 2**20
    with pytest.raises(SlimeLikeError) as caught:
        Cluster(ClusterConfig(object_store_mb=more), tmp_path / "logs", 1).__enter__()
    assert caught.value.code == "object-store-size" and f"object_store_mb={more}: of this machine" in str(caught.value)
    assert started == [] and [path.name for path in tmp_path.iterdir()] == ["logs"]


@pytest.mark.parametrize("address", ["auto", "given", "closed"])
def test_a_cluster_that_gives_no_answer_is_refused_within_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: InterruptHandler, address: str
) -> None:
    """Ray itself asks for ever, and prints why. A cluster that nobody may join without its token is like that."""
    monkeypatch.setattr(cluster, "_ANSWER_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        if address == "closed":
            silent.close()
        if address == "auto":
            monkeypatch.setenv("RAY_ADDRESS", place)
        with pytest.raises(SlimeLikeError) as caught:
            Cluster(ClusterConfig(address="auto" if address == "auto" else place), tmp_path / "logs", 1).__enter__()
    assert caught.value.code == "cluster-silent"
    assert ("gives no answer" in caught.value.problem) == (address != "closed")


def test_a_node_of_a_launched_cluster_refuses_such_a_store_alike(tmp_path: Path) -> None:
    more = 2 * psutil.virtual_memory().total // 2**20
    spec = json.dumps(asdict(RayNodeSpec(0, "127.0.0.1", None, str(tmp_path), 1, more)))
    command = [sys.executable, "-m", "slime_like.orchestration.cluster.ray_process", spec]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and ended.stdout == ""
    assert ended.stderr.startswith(f"cluster.object_store_mb={more}: of this machine's memory ")
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_that_is_too_small_is_refused_at_once(tmp_path: Path, rejects: Rejects) -> None:
    """Reserved, numbered, given back; and what the cluster does not have is named instead of waited for."""
    references = {"placement": "workers", "workers": 2}
    fits = config(tmp_path, trainer={"parallel": {"data": 3}}, reference=references, algorithm={"kl_coef": 0.1})
    larger = config(tmp_path, trainer={"parallel": {"data": 300}})
    fits.run_dir.mkdir()
    with Cluster(fits.cluster, fits.run_dir / "worker_logs", slots=6):
        session = (fits.run_dir / "worker_logs").readlink().parent
        private = session.parent.parent
        assert private.stat().st_mode & 0o777 == 0o700
        assert _obtained_by_another_user(session) == []
        token = private / "token"
        assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(token) and token.stat().st_mode & 0o777 == 0o600
        assert _answered_with("wrong" * 10) == "AuthenticationError" and _answered_with(token.read_text()) == "answered"
        for _ in range(2):  # the second time needs what the first one gave back
            with Placement(fits) as placement:
                assert placement.device == "CPU" and placement.num_nodes == 1
                assert [placement.ranks_on_node(rank) for rank in range(3)] == [3, 3, 3]
                assert [placement.ranks_on_node(0, reference) for reference in range(2)] == [2, 2]
                strategies = [placement.trainer_options(rank)["scheduling_strategy"] for rank in range(3)]
                strategies.append(placement.engine_options(0)["scheduling_strategy"])
                strategies += [placement.reference_options(i, 0)["scheduling_strategy"] for i in range(2)]
                assert [strategy.placement_group_bundle_index for strategy in strategies] == [0, 1, 2, 3, 4, 5]
        with rejects(SlimeLikeError):
            Placement(larger).__enter__()
    assert not ray.is_initialized()
    assert not private.exists()
    logs = list((fits.run_dir / "worker_logs").rglob("*"))
    assert logs and not [path for path in logs if path.stat().st_mode & 0o022]


def _answered_with(token: str) -> str:
    """What the living cluster's GCS says to a process with this token."""
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


def _obtained_by_another_user(session: Path) -> list[str]:
    """What a process of another user can do with the files of a living cluster; needs root to become one."""
    if os.geteuid() != 0:
        return []
    attempts = {
        "list": lambda: list(session.iterdir()),
        "open socket": lambda: (session / "sockets" / "raylet").stat(),
        "unlink socket": lambda: (session / "sockets" / "plasma_store").unlink(),
        "rename log": lambda: (session / "logs" / "raylet.out").rename(session / "logs" / "mine"),
        "plant log": lambda: (session / "logs" / "planted").write_text("x"),
        "rename session": lambda: session.rename(session.with_name("mine")),
        "rename Ray's": lambda: session.parent.rename(session.parent.with_name("mine")),
        "plant beside": lambda: (session.parent / "planted").write_text("x"),
    }
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        for name, attempt in attempts.items():
            try:
                attempt()
            except PermissionError:
                continue
            os.write(writing, f"{name}\n".encode())
        os.write(writing, b"end")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        *obtained, end = answers.read().split("\n")
    os.waitpid(child, 0)
    assert end == "end"
    return obtained


def test_a_failure_behind_the_death_of_a_daemon_names_the_daemon(tmp_path: Path) -> None:
    """A raylet ends with its agent; what failed in the driver meanwhile is a consequence."""
    with pytest.raises(SlimeLikeError) as caught, Cluster(ClusterConfig(), tmp_path / "logs", slots=1):
        found = psutil.Process().children(recursive=True)
        (raylet,) = (daemon for daemon in found if daemon.name() == "raylet")
        agents = [child for child in raylet.children() if "RuntimeEnvAgent" in " ".join(child.cmdline())]
        agents[0].kill()
        raylet.wait(30)
        raise SlimeLikeError("a call was lost", code="lost")
    assert caught.value.code == "ray-died" and caught.value.who == "cluster"
    assert "raylet" in caught.value.problem and "runtime_env_agent" in caught.value.problem
    assert "a call was lost" in caught.value.problem


def test_a_daemon_that_dies_while_ray_starts_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_raylet = services.start_raylet

    def start(*arguments: Any, **options: Any) -> Any:
        _children("gcs_server")[0].kill()
        return start_raylet(*arguments, **options)

    monkeypatch.setattr(services, "start_raylet", start)
    began, starting = time.monotonic(), Cluster(ClusterConfig(), tmp_path / "logs", slots=1)
    with pytest.raises(SlimeLikeError) as caught:
        starting.__enter__()
    assert caught.value.code == "ray-not-started" and "gcs_server ended by itself with -9" in caught.value.problem
    assert time.monotonic() - began < 25
    starting._guard.wait(60)  # it ends what Ray's failed start leaves
    assert _children("raylet") == []


def test_a_gcs_that_dies_before_it_listens_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "start_gcs_server", _started_to_die(services.start_gcs_server))
    began, starting = time.monotonic(), Cluster(ClusterConfig(), tmp_path / "logs", slots=1)
    with pytest.raises(SlimeLikeError) as caught:
        starting.__enter__()
    assert caught.value.code == "ray-not-started" and "gcs_server ended by itself with -9" in caught.value.problem
    assert time.monotonic() - began < 25
    starting._guard.wait(60)


def _started_to_die(start: Callable[..., Any]) -> Callable[..., Any]:
    def start_and_kill(*arguments: Any, **options: Any) -> Any:
        started = start(*arguments, **options)
        _children("gcs_server")[0].kill()
        return started

    return start_and_kill


def _children(name: str) -> list[psutil.Process]:
    """Living processes of this name below this one."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # others end meanwhile
            if child.name() == name and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def test_a_stopped_daemon_ends_whatever_the_run_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the driver fails by itself meanwhile: this one waits for no answer of Ray.

    A process in the background of a script ignores SIGINT, and goes on to do so: only the watch's own is heard.
    """
    # An earlier test's handler of SIGTERM would be taken for one that has lost SIGINT to a library.
    given = {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_DFL}
    usual = {number: signal.signal(number, handler) for number, handler in given.items()}
    try:
        _stop_a_daemon(tmp_path, monkeypatch)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def _stop_a_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopped, "END_AFTER_S", 1.5)
    monkeypatch.setattr(daemons, "_FAILS_BEFORE_S", 0.0)  # as on a machine too busy to look again
    notes: list[str] = []
    began = time.monotonic()
    with (
        pytest.raises(SlimeLikeError) as caught,
        Cluster(ClusterConfig(), tmp_path / "logs", slots=1, note=notes.append) as own,
    ):
        (raylet,) = _children("raylet")
        raylet.suspend()
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)  # ignored
        time.sleep(120)
    assert own.run_name and time.monotonic() - began < 60
    assert caught.value.code == "ray-died" and "raylet" in caught.value.problem
    assert "was ended" in caught.value.problem and len(notes) == 1 and "of Ray's raylet" in notes[0]
