"""Endpoint on the loopback interface where Prometheus reads a run's metrics."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from slime_like.errors import SlimeLikeError

HOST = "127.0.0.1"


def gauge_name(metric: str) -> str:
    """Return a metric's name for Prometheus: ``slime_like_`` and the name's letters and digits, joined by ``_``."""
    return "_".join(["slime_like", *re.findall("[a-zA-Z0-9]+", metric)])


class PrometheusTracker:
    """Tracker that serves the last value of every metric on ``port``.

    Raises ``SlimeLikeError`` if the port cannot be opened.
    """

    def __init__(self, port: int) -> None:
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        try:
            self._server, self._thread = start_http_server(port, HOST, self._registry)
        except OSError as error:
            problem, who = f"cannot be opened on {HOST} ({error.strerror})", f"logging.prometheus_port={port}"
            raise SlimeLikeError(problem, code="port-unavailable", who=who, remedy="use another port") from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Set the gauges of ``values``, and of ``step``."""
        for name, value in {**values, "step": step}.items():
            if (gauge := gauge_name(name)) not in self._gauges:
                self._gauges[gauge] = Gauge(gauge, name, registry=self._registry)
            self._gauges[gauge].set(value)

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
