"""A connection between two nodes on which both have proved that they know the cluster's key, and nobody else can speak.

Each side sends a random number, and a keyed hash (HMAC-SHA256, RFC 2104) of both numbers and its role proves the key
without telling it. A key of this one connection is derived in the same way; every later line carries the hash of
itself, its direction and its number, so that no line can be forged, changed, repeated or left out. Lines are not
encrypted: they hold addresses and sentences, no secret.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading

from slime_like.launch.messages import Message, decode, encode

_LONGEST_LINE = 65_536
_NONCE_BYTES = 32
_GREETING = b"slime-like cluster 1\n"
_ENDED = "its connection ended without a word"


class WrongKeyError(Exception):
    """The other side does not know the key, or is no node of a cluster at all."""


class LostError(Exception):
    """The other side is gone: the message says how that was noticed."""


class Channel:
    """Messages both ways. ``send`` may be called by several threads, ``receive`` by one."""

    def __init__(self, connection: socket.socket, key: bytes, leads: bool, timeout_s: float) -> None:
        """Shake hands.

        Args:
            leads: is this node 0's side?
            timeout_s: bound on the handshake; later on ``silence_s`` of ``receive`` counts.

        Raises:
            WrongKeyError: the other side could not prove that it knows the key.
            OSError: the connection broke, or time ran out.
        """
        self._connection = connection
        connection.settimeout(timeout_s)
        self._reader = connection.makefile("rb")
        self._sending = threading.Lock()
        own, other = (b"head", b"node") if leads else (b"node", b"head")
        both = self._exchange_proofs(key, own, other)
        self._key = hmac.digest(key, b"session" + both, "sha256")
        self._own, self._other = own, other
        self._sent = self._received = 0

    def send(self, message: Message) -> None:
        """
        Raises:
            LostError: the connection is broken.
        """
        body = encode(message)
        with self._sending:
            line = self._mark(self._own, self._sent, body) + b" " + body + b"\n"
            self._sent += 1
            try:
                self._connection.sendall(line)
            except OSError as error:
                raise LostError(f"its connection broke ({error.strerror or error})") from error

    def receive(self, silence_s: float) -> Message:
        """The next message.

        Raises:
            LostError: the connection ended or broke, or nothing came within ``silence_s`` seconds.
        """
        try:
            self._connection.settimeout(silence_s)
            line = self._reader.readline(_LONGEST_LINE)
        except TimeoutError as error:
            raise LostError(f"it has been silent for {silence_s:.0f} s") from error
        except ConnectionResetError as error:  # a process that ends with something unread resets its connection
            raise LostError(_ENDED) from error
        except (OSError, ValueError) as error:
            raise LostError(f"its connection broke ({error})") from error
        if not line.endswith(b"\n"):
            raise LostError(_ENDED)
        mark, _, body = line[:-1].partition(b" ")
        if not hmac.compare_digest(mark, self._mark(self._other, self._received, body)):
            raise LostError("a line of its connection was forged or damaged")
        self._received += 1
        try:
            return decode(body)
        except ValueError as error:
            raise LostError(f"what it says is {error}; do all nodes have the same version?") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes whoever reads
        self._connection.close()

    def _exchange_proofs(self, key: bytes, own: bytes, other: bytes) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES).hex().encode()
        self._connection.sendall(_GREETING + nonce + b"\n")
        if self._line() + b"\n" != _GREETING:
            raise WrongKeyError("it is no node of a cluster")
        theirs = self._line()
        # In a fixed order on both sides, whoever is first.
        both = nonce + theirs if own == b"head" else theirs + nonce
        self._connection.sendall(hmac.digest(key, own + both, "sha256").hex().encode() + b"\n")
        if len(theirs) != 2 * _NONCE_BYTES or not hmac.compare_digest(
            self._line(), hmac.digest(key, other + both, "sha256").hex().encode()
        ):
            raise WrongKeyError("it does not know the cluster's key")
        return both

    def _line(self) -> bytes:
        """A short line of the handshake; "" where the other side hung up."""
        return self._reader.readline(256).rstrip(b"\n")

    def _mark(self, sender: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, sender + number.to_bytes(8, "big") + body, "sha256").hex().encode()
