"""Watch over Ray's daemons in a cluster that the run started. A daemon that ends or is stopped ends the run by name.

Without its raylet, a driver that waits for a lost worker's object waits forever. Without the GCS, Ray ends the driver
after a while, and the driver cannot clean up. State calls and ``ray.put`` release the interpreter, so this thread runs
while they hang. The driver cannot be interrupted then: once the stopped daemon is killed, Ray ends the driver, and the
orphan reaper reports the daemon.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType

import psutil

from slime_like.orchestration.cluster.lean_node import VITAL, LeanNode
from slime_like.orchestration.cluster.stopped import Stopped, StopWatch, as_stopped

_AGENT = "RuntimeEnvAgent"
"""Agent without which no worker starts. A run does not need Ray's other agents to respond."""

_LOOK_EVERY_S = 0.5
_LOOKS_PER_STOP = 10
"""Checks for deaths per check for stops, which reads all processes of the host."""

_GRACE_S = 3.0
"""Time from a daemon's death to the interrupt. A failure that appears by itself in this time explains more."""

_FAILS_BEFORE_S = 0.5
"""Time that a daemon may outlive the first failure its death causes."""


class DaemonWatch:
    """Thread that checks the daemons.

    Args:
        node: node of the daemons.
        note: called with sentences about stopped daemons, from that thread.

    Attributes:
        interrupted_for: daemon for whose end the watch has interrupted the main thread like Ctrl-C. Only a watch made
            there can.
    """

    def __init__(self, node: LeanNode, note: Callable[[str], None]) -> None:
        self._node, self._note = node, note
        self._watch = StopWatch()
        self._over = threading.Event()
        self._deciding = threading.Lock()
        self._may_interrupt = threading.current_thread() is threading.main_thread()
        self._thread = threading.Thread(target=self._run, name="daemons", daemon=True)
        self.interrupted_for: str | None = None
        self._deaf = self._may_interrupt and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if self._deaf:  # scripts start background commands ("&") like this; only this watch's interrupt counts then
            signal.signal(signal.SIGINT, self._hear)
        self._thread.start()

    def close(self) -> None:
        """End the thread. If it interrupts just now, the run is ending already."""
        try:
            with self._deciding:
                self._over.set()
            self._thread.join()
        except KeyboardInterrupt:
            if self.interrupted_for is None:
                raise
            self._over.set()
        if self._deaf:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def cause(self) -> str | None:
        """Return the daemon that caused a failure, if any. Wait a moment for one that is about to end.

        A daemon that interrupted the run is already known, since a busy machine may let the moment pass.
        """
        until = time.monotonic() + _FAILS_BEFORE_S
        while True:
            if (died := self.interrupted_for or self._node.ended_daemon()) is not None:
                ended = self._watch.recently_ended(time.monotonic())
                return f"{ended}; {died}" if ended else died
            if time.monotonic() >= until:
                return next((f"{one} is stopped (SIGSTOP)" for one in self._stopped()), None)
            time.sleep(_LOOK_EVERY_S / 5)

    def end_stopped(self) -> None:
        """Kill stopped daemons: requests to them would never return."""
        for one in self._stopped():
            one.kill()

    def _run(self) -> None:
        looks = 0
        while not self._over.wait(_LOOK_EVERY_S):
            if looks % _LOOKS_PER_STOP == 0:
                notes, end = self._watch.look(list(self._stopped()), time.monotonic())
                for note in notes:
                    self._note(note)
                for one in end:
                    one.kill()
            looks += 1
            if (died := self._node.ended_daemon()) is not None:
                self._over.wait(_GRACE_S)
                self._interrupt(died)
                return

    def _interrupt(self, died: str) -> None:
        with self._deciding:
            if self._may_interrupt and not self._over.is_set():
                self.interrupted_for = died
                # The process could deliver its signal to a thread that is not running.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted_for is not None:
            raise KeyboardInterrupt

    def _stopped(self) -> Iterator[Stopped]:
        for kind in VITAL:
            for info in self._node.all_processes.get(kind, []):
                with suppress(psutil.NoSuchProcess):
                    daemon = psutil.Process(info.process.pid)
                    if found := as_stopped(daemon, "this host", f"Ray's {kind}"):
                        yield found
                    # A raylet's children are its agents and the workers. StoppedWorkers checks the workers.
                    for agent in (child for child in daemon.children() if _AGENT in _command(child)):
                        if found := as_stopped(agent, "this host", "Ray's runtime_env_agent"):
                            yield found


def _command(process: psutil.Process) -> str:
    """Return the command line; empty if the process has ended, which must not hide its siblings."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""
