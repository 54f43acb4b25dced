"""A reward service on this host, for the tests of the HTTP reward."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Service(BaseHTTPRequestHandler):
    """What it answers depends on the response it is asked about."""

    def do_POST(self) -> None:
        item = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = item["response"]
        if asked == "slow":
            time.sleep(1)
        word, _, code = asked.partition(" ")
        status = 503 if asked == "busy" else int(code) if word == "redirect" else 200
        body = {
            "plain": b'{"reward": 0.5}',
            "zero": b'{"reward": 0}',
            "failed": b'{"reward": 2, "success": false, "why": "too long"}',
            "text": b"fine",
            "list": b"[1]",
            "none": b'{"success": true}',
            "word": b'{"reward": 1, "success": "false"}',
        }.get(asked, json.dumps({"reward": 1.0, "seen": item, "key": self.headers.get("X-Key")}).encode())
        with contextlib.suppress(BrokenPipeError):  # the request for a slow answer has ended
            self.send_response(status)
            if word == "redirect":
                self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(body)

    def do_GET(self) -> None:
        """What a redirected POST would become."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"reward": 1}')

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/score"
        server.shutdown()
        thread.join(10)
