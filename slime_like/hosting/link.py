"""Messages between an engine's owner and the process it has started, over the two ends of one socket pair.

Both processes run this package and one has started the other, so that messages are pickled: nothing else can reach the
pair, which has no address.
"""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any


class Link:
    """One end. A separate thread receives, so that the other side's end is noticed whatever this process does."""

    def __init__(
        self, connection: Connection, on_message: Callable[[Any], object], on_close: Callable[[], object]
    ) -> None:
        self._connection = connection
        self._on_message = on_message
        self._on_close = on_close
        threading.Thread(target=self._receive, name="engine-link", daemon=True).start()

    def send(self, message: Any) -> None:
        """Raises ``OSError`` if the other side has ended."""
        self._connection.send(message)

    def close(self) -> None:
        """Hang up: both sides' ``on_close`` are called."""
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as pair:
            pair.shutdown(socket.SHUT_RDWR)  # closing the descriptor would not wake the thread that reads from it

    def _receive(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                self._connection.close()
                self._on_close()
                return
            self._on_message(message)
