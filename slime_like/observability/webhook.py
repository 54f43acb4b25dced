"""A webhook that gets alarms as JSON. Its failures never end a run."""

import os
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from threading import Thread
from typing import Any

import httpx

TIMEOUT_S = 10.0


class Webhook:
    """Thread that posts rows to ``url``, in order. The first failed post is noted."""

    def __init__(self, url: str, note: Callable[[str], None]) -> None:
        self._url, self._note = os.path.expandvars(url), note
        self._rows = SimpleQueue[Mapping[str, Any] | None]()
        self._thread = Thread(target=self._send, name="webhook", daemon=True)
        self._thread.start()

    def post(self, row: Mapping[str, Any]) -> None:
        self._rows.put(row)

    def close(self) -> None:
        """Wait at most ``TIMEOUT_S`` for posts under way."""
        self._rows.put(None)
        self._thread.join(TIMEOUT_S)

    def _send(self) -> None:
        is_noted = False
        while (row := self._rows.get()) is not None:
            try:
                status = httpx.post(self._url, json=row, timeout=TIMEOUT_S).status_code
                problem = "" if status < 300 else f"status {status}"
            except (httpx.HTTPError, httpx.InvalidURL) as error:  # whose text may have the URL, a secret
                problem = type(error).__name__
            if problem and not is_noted:
                is_noted = True
                self._note(f"health.webhook: a post failed ({problem}); alarms are also in events.jsonl")
