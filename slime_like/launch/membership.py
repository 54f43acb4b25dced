"""Both ends of the connections between node 0 and every other node, as queues of events."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from slime_like.errors import LaunchError
from slime_like.launch.channel import Channel, LostError, WrongKeyError
from slime_like.launch.messages import Alive, Hello, Join, Joined, Look, Message, Problem, Seen, Verdict
from slime_like.system.interrupts import raise_if_interrupted
from slime_like.system.network import host_and_port, listen

HEARTBEAT_S = 2.0
_HANDSHAKE_S = 10.0
_LOOK_EVERY_S = 0.5
_TRY_AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class Lost:
    """An event of our own making: this node's connection is gone, and how that was noticed."""

    how: str


Event = Message | Lost


@dataclass(slots=True)
class _Peer:
    """A node that has reported.

    Attributes:
        hello: what it said of itself.
        here: it has not left.
    """

    hello: Hello
    channel: Channel
    here: bool = True

    @property
    def name(self) -> str:
        return f"node {self.hello.rank} ({self.hello.host}, {self.hello.address})"


class RollCall:
    """Node 0's side: accepts the other nodes, and knows who is there. Context manager."""

    def __init__(self, address: str, port: int, key: bytes, nodes: int, silence_s: float) -> None:
        """
        Raises:
            LaunchError: the port is taken.
        """
        self._key = key
        self._nodes = nodes
        self._silence_s = silence_s
        self._peers: dict[int, _Peer] = {}
        self._lock = threading.Lock()
        self._events: queue.Queue[tuple[str, Event]] = queue.Queue()
        self._closing = threading.Event()
        self._turned_away = ""
        self._verdict: Verdict | None = None
        try:
            self._listener = listen(address, port)
        except OSError as error:
            raise LaunchError(
                f"port {port} of {address} cannot be listened on ({error.strerror}); end what uses it, or give "
                "another PORT to every node"
            ) from error

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def __enter__(self) -> RollCall:
        for work in (self._accept, self._beat):
            threading.Thread(target=work, name="roll-call", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts; else the port would stay open
        self._listener.close()
        with self._lock:
            for peer in self._peers.values():
                peer.channel.close()

    def missing(self) -> list[int]:
        """Ranks that have not reported, or have left."""
        with self._lock:
            return [rank for rank in range(1, self._nodes) if rank not in self._peers or not self._peers[rank].here]

    @property
    def is_complete(self) -> bool:
        """Has every rank reported, whether or not it has left since?"""
        with self._lock:
            return len(self._peers) == self._nodes - 1

    def hellos(self) -> dict[str, Hello]:
        """What every node said of itself, by its full name."""
        with self._lock:
            return {peer.name: peer.hello for peer in self._peers.values()}

    @property
    def turned_away(self) -> str:
        """Of the last one who could not be let in: who, and why; "" where there was none."""
        return self._turned_away

    def next_event(self, timeout_s: float = _LOOK_EVERY_S) -> tuple[str, Event] | None:
        """Whose event, and what; ``None`` where nothing happened within ``timeout_s`` seconds."""
        raise_if_interrupted()
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def tell(self, name: str, message: Look) -> None:
        """To the node of that full name."""
        with self._lock:
            peers = [peer for peer in self._peers.values() if peer.name == name]
        for peer in peers:
            with contextlib.suppress(LostError):  # its reader says so
                peer.channel.send(message)

    def tell_all(self, message: Join | Verdict) -> None:
        """To every node that is still here; a verdict also to whoever comes later."""
        with self._lock:
            self._verdict = message if isinstance(message, Verdict) else None
            peers = [peer for peer in self._peers.values() if peer.here]
        for peer in peers:
            with contextlib.suppress(LostError):  # its reader says so
                peer.channel.send(message)

    def wait_until_gone(self, timeout_s: float) -> None:
        """Until every node has hung up."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and len(self.missing()) < self._nodes - 1:
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=0.1)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection, host), name="roll-call", daemon=True).start()

    def _serve(self, connection: socket.socket, host: str) -> None:
        try:
            channel = Channel(connection, self._key, leads=True, timeout_s=_HANDSHAKE_S)
            hello = channel.receive(_HANDSHAKE_S)
        except (OSError, LostError, WrongKeyError) as error:
            connection.close()
            self._turned_away = f"{host} was turned away: {error}"
            return
        peer = self._enter(hello, channel) if isinstance(hello, Hello) else None
        if peer is None:
            channel.close()
            return
        self._events.put((peer.name, peer.hello))
        event: Event = peer.hello
        while not isinstance(event, Lost):
            try:
                event = channel.receive(self._silence_s)
            except LostError as error:
                event = Lost(str(error))
                peer.here = False
            if not isinstance(event, Alive):
                self._events.put((peer.name, event))

    def _enter(self, hello: Hello, channel: Channel) -> _Peer | None:
        """Write a node down, unless its rank is impossible or taken, or the run has ended: then it is told."""
        with self._lock:
            taken = self._peers.get(hello.rank)
            if 1 <= hello.rank < self._nodes and (taken is None or not taken.here) and self._verdict is None:
                self._peers[hello.rank] = _Peer(hello, channel)
                return self._peers[hello.rank]
        reason = f"{taken.name} has it already" if taken else f"of NODES={self._nodes} it is 1 to {self._nodes - 1}"
        refusal = Verdict(1, f"NODE_RANK={hello.rank} on {hello.host} is refused: {reason}")
        with contextlib.suppress(LostError):
            channel.send(self._verdict or refusal)
        return None

    def _beat(self) -> None:
        while not self._closing.wait(HEARTBEAT_S):
            with self._lock:
                peers = [peer for peer in self._peers.values() if peer.here]
            for peer in peers:
                with contextlib.suppress(LostError):
                    peer.channel.send(Alive())


class Membership:
    """Any other node's side: one connection to node 0. Context manager."""

    def __init__(self, channel: Channel, silence_s: float) -> None:
        self._channel = channel
        self._silence_s = silence_s
        self._events: queue.Queue[Event] = queue.Queue()
        self._closing = threading.Event()

    @classmethod
    def open(
        cls,
        head: str,
        port: int,
        key: bytes,
        timeout_s: float,
        silence_s: float,
        look: Callable[[], None] = lambda: None,
    ) -> Membership:
        """Keep trying until node 0 answers. ``look`` is called between two tries, and may raise.

        Raises:
            LaunchError: it did not within ``timeout_s``, or does not know the key.
        """
        where, deadline, why = host_and_port(head, port), time.monotonic() + timeout_s, "nothing was tried"
        while time.monotonic() < deadline:
            raise_if_interrupted()
            try:
                return cls(_connect(head, port, key, min(_HANDSHAKE_S, timeout_s)), silence_s)
            except WrongKeyError as error:
                raise LaunchError(
                    f"{where} answers, but {error}: give every node the same TOKEN_FILE, or another PORT where "
                    "something else uses this one"
                ) from error
            except OSError as error:
                why = error.strerror or str(error)
                look()
                time.sleep(_TRY_AGAIN_S)
        raise LaunchError(
            f"node 0 did not answer at {where} within {timeout_s:.0f} s ({why}); is HEAD_ADDR right, and was node 0 "
            "started there?"
        )

    def __enter__(self) -> Membership:
        for work in (self._read, self._beat):
            threading.Thread(target=work, name="membership", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._channel.close()

    def say(self, message: Hello | Seen | Joined | Problem) -> None:
        with contextlib.suppress(LostError):  # the reader says so
            self._channel.send(message)

    def next_event(self, timeout_s: float = _LOOK_EVERY_S) -> Event | None:
        """What node 0 says; ``None`` where it said nothing within ``timeout_s`` seconds."""
        raise_if_interrupted()
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _read(self) -> None:
        event: Event = Alive()
        while not isinstance(event, (Lost, Verdict)):
            try:
                event = self._channel.receive(self._silence_s)
            except LostError as error:
                event = Lost(str(error))
            if not isinstance(event, Alive):
                self._events.put(event)

    def _beat(self) -> None:
        while not self._closing.wait(HEARTBEAT_S):
            with contextlib.suppress(LostError):
                self._channel.send(Alive())


def _connect(head: str, port: int, key: bytes, timeout_s: float) -> Channel:
    connection = socket.create_connection((head, port), timeout_s)
    try:
        return Channel(connection, key, leads=False, timeout_s=timeout_s)
    except BaseException:
        connection.close()
        raise
