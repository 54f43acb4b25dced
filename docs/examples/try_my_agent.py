"""Run the agent without a model: a server of the same protocol gives two answers, of which the second is right."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from my_agent import solve

from slime_like.interfaces import AgentTask

ANSWERS = ["41", "No, 42."]


class Model(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = ANSWERS[len(asked["messages"]) // 2]
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        whole = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(whole).encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


with HTTPServer(("127.0.0.1", 0), Model) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    messages = [{"role": "user", "content": "What is 6 times 7?"}]
    result = asyncio.run(solve(AgentTask("", messages, "42", {}, url, "key")))
    server.shutdown()
assert (result.reward, result.success) == (1.0, True)
