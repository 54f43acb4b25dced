"""Ray's daemons of a run's own cluster: one that ends or is stopped ends the run by its name, whatever that waits for.

Without its raylet a driver waits for ever where it waits for an object of a worker that died with it. Without the GCS
Ray ends the driver after a while, which then cannot clean up.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType

import psutil  # type: ignore[import-untyped]

from slime_like.orchestration.cluster.lean_node import VITAL, LeanNode
from slime_like.orchestration.cluster.stopped import Stopped, StopWatch, as_stopped

_AGENT = "RuntimeEnvAgent"
"""No worker starts without it. A run goes on without Ray's other agents as long as they live."""

_LOOK_EVERY_S = 0.5
_LOOKS_PER_STOP = 10
"""Looks at deaths per look at stops, which reads about all processes of the host."""

_GRACE_S = 3.0
"""From a death until the run is interrupted: what fails by itself within this time has more to say."""

_FAILS_BEFORE_S = 0.5
"""How long a daemon may outlive the first failure that its death causes."""


class DaemonWatch:
    """Looks at the daemons in a thread, from its making on.

    Args:
        node: whose daemons.
        note: called with sentences about stopped ones, from that thread.

    Attributes:
        interrupted: it has interrupted the main thread, as Ctrl-C does; never where another thread has made it.
    """

    def __init__(self, node: LeanNode, note: Callable[[str], None]) -> None:
        self._node, self._note = node, note
        self._watch = StopWatch()
        self._over = threading.Event()
        self._deciding = threading.Lock()
        self._may_interrupt = threading.current_thread() is threading.main_thread()
        self._thread = threading.Thread(target=self._run, name="daemons", daemon=True)
        self.interrupted = False
        self._died: str | None = None
        self._deaf = self._may_interrupt and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if self._deaf:  # a script's command with "&" starts so; of all its interrupts only that of this watch counts
            signal.signal(signal.SIGINT, self._hear)
        self._thread.start()

    def close(self) -> None:
        """End the thread. An interrupt of its making that comes now has found the run ending already."""
        try:
            with self._deciding:
                self._over.set()
            self._thread.join()
        except KeyboardInterrupt:
            if not self.interrupted:
                raise
            self._over.set()
        if self._deaf:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def cause(self) -> str | None:
        """Which daemon a failure now is a consequence of. Waits a moment for one that is about to end.

        What has interrupted the run is never looked for again: a busy machine may let the moment pass unused.
        """
        until = time.monotonic() + _FAILS_BEFORE_S
        while True:
            if (died := self._died or self._node.ended_daemon()) is not None:
                ended = self._watch.recently_ended(time.monotonic())
                return f"{ended}; {died}" if ended else died
            if time.monotonic() >= until:
                return next((f"{one} is stopped (SIGSTOP)" for one in self._stopped()), None)
            time.sleep(_LOOK_EVERY_S / 5)

    def end_stopped(self) -> None:
        """Kill what is stopped: nothing that asks it ends."""
        for one in self._stopped():
            one.kill()

    def _run(self) -> None:
        looks = 0
        while not self._over.wait(_LOOK_EVERY_S):
            if looks % _LOOKS_PER_STOP == 0:
                self._look_for_stops()
            looks += 1
            if (died := self._node.ended_daemon()) is not None:
                self._over.wait(_GRACE_S)
                self._interrupt(died)
                return

    def _look_for_stops(self) -> None:
        notes, end = self._watch.look(list(self._stopped()), time.monotonic())
        for note in notes:
            self._note(note)
        for one in end:
            one.kill()

    def _interrupt(self, died: str) -> None:
        with self._deciding:
            if self._may_interrupt and not self._over.is_set():
                self._died, self.interrupted = died, True
                # Of a signal to the process, a thread that does not run just then may be the one to take note.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt

    def _stopped(self) -> Iterator[Stopped]:
        for name, process in self._processes():
            if found := as_stopped(process, "this host", f"Ray's {name}"):
                yield found

    def _processes(self) -> Iterator[tuple[str, psutil.Process]]:
        for kind in VITAL:
            for info in self._node.all_processes.get(kind, []):
                with suppress(psutil.NoSuchProcess):
                    process = psutil.Process(info.process.pid)
                    yield kind, process
                    # A stopped raylet's children are its agents and the workers, which are looked at elsewhere.
                    for child in process.children():
                        with suppress(psutil.NoSuchProcess):
                            if _AGENT in " ".join(child.cmdline()):
                                yield "runtime_env_agent", child
