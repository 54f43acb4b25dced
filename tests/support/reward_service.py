"""A reward service and a judging model on this host."""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

_ANSWERS = {
    "plain": b'{"reward": 0.5}',
    "zero": b'{"reward": 0}',
    "failed": b'{"reward": 2, "success": false, "why": "too long"}',
    "text": b"fine",
    "list": b"[1]",
    "none": b'{"success": true}',
    "word": b'{"reward": 1, "success": "false"}',
}
_VERDICTS = {
    "good": "It is.\nScore: 9",
    "bad": "No.\n**Score: 2.5**",
    "over": "Score: 3\nScore: 99",
    "bold": "**Score**: `7`",
    "thought": "<think>Score: 3?</think>\nScore: 8",
    "cut off": "<think>Score: 3? No, Score: 9, but",
}


class Service(BaseHTTPRequestHandler):
    """The answer depends on the response in question. A judge is ``busy`` until the third request."""

    judged: ClassVar[list[tuple[dict[str, Any], str | None, str]]] = []
    asked: ClassVar[Counter[str]] = Counter()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, location = 200, ""
        if "messages" in body:
            self.judged.append((body, self.headers["Authorization"], self.path))
            word = body["messages"][0]["content"].partition("<response>\n")[2].partition("\n")[0]
            self.asked[word] += 1
            status = 503 if word == "busy" and self.asked[word] < 3 else 404 if word == "gone" else 200
            choice = {"message": {"role": "assistant", "content": _VERDICTS.get(word, word)}}
            answer = b"what?" if word == "garbage" else json.dumps({"choices": [choice]}).encode()
            if word == "refused" and body.keys() & {"max_tokens", "temperature"}:
                key = self.headers["Authorization"].encode()
                status, answer = 400, b"Unsupported\n\x1b[2Jparameter of " + key + b"\xff!" * 5000
        else:
            asked = body["response"]
            word, _, code = asked.partition(" ")
            if asked == "slow":
                time.sleep(1)
            status = 503 if asked == "busy" else int(code) if word == "redirect" else 200
            location = "/elsewhere" if word == "redirect" else ""
            seen = json.dumps({"reward": 1.0, "seen": body, "key": self.headers.get("X-Key")})
            answer = _ANSWERS.get(asked, seen.encode())
        with contextlib.suppress(BrokenPipeError):  # the request for a slow answer has ended
            self.send_response(status)
            if location:
                self.send_header("Location", location)
            self.end_headers()
            self.wfile.write(answer)

    def do_GET(self) -> None:
        """Answer what a redirected POST would become."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"reward": 1}')

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/score"
        server.shutdown()
        thread.join(10)
