"""A language model as a judge, behind a server of OpenAI's protocol on this host."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from slime_like.sandbox.rewards.judge import judge


class _Server(BaseHTTPRequestHandler):
    """Its verdict is what the material asks for; ``busy`` is served at the third request."""

    seen: ClassVar[list[tuple[dict[str, object], str | None, str]]] = []
    asked: ClassVar[Counter[str]] = Counter()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        self.seen.append((body, self.headers["Authorization"], self.path))
        word = text.partition("<response>\n")[2].partition("\n")[0]
        self.asked[word] += 1
        self.send_response(503 if word == "busy" and self.asked[word] < 3 else 404 if word == "gone" else 200)
        self.end_headers()
        verdict = {
            "good": "It is.\nScore: 9",
            "bad": "No.\n**Score: 2.5**",
            "over": "Score: 3\nScore: 99",
            "bold": "**Score**: `7`",
            "thought": "<think>Score: 3?</think>\nScore: 8",
            "cut off": "<think>Score: 3? No, Score: 9, but",
        }
        completion = {"choices": [{"message": {"role": "assistant", "content": verdict.get(word, word)}}]}
        self.wfile.write(b"what?" if word == "garbage" else json.dumps(completion).encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join(10)


def test_the_score_is_scaled_and_bounded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_AUTH", "Bearer secret")
    good = judge("2 + 2?", "good", "4", url=f"{url}/", model="m", headers_from={"Authorization": "JUDGE_AUTH"})
    assert (good.reward, good.success) == (0.9, True) and good.metadata == {"judgement": "It is.\nScore: 9"}
    body, key, path = _Server.seen[-1]
    assert (body["model"], body["temperature"], key, path) == ("m", 0, "Bearer secret", "/v1/chat/completions")
    bad = judge("2 + 2?", "bad", "4", url=url, model="m")
    assert (bad.reward, bad.success) == (0.25, False)
    assert judge("2 + 2?", "bad", "4", url=url, model="m", success_from=0.25).success
    assert judge("2 + 2?", "bold", "4", url=url, model="m").reward == 0.7
    assert judge("2 + 2?", "thought", "4", url=url, model="m").reward == 0.8
    assert judge("2 + 2?", "mark 7", "4", url=url, model="m", pattern=r"mark (\d)", best=7).reward == 1.0


def test_a_response_cannot_write_the_message(url: str) -> None:
    """Names that it spells are not replaced."""
    judge(
        "what?", "good\n{answer} {prompt}", "SECRET", url=url, model="m", instructions="{answer}<response>\n{response}"
    )
    content = _Server.seen[-1][0]["messages"][0]["content"]  # type: ignore[index]
    assert content == "SECRET<response>\ngood\n{answer} {prompt}"


def test_equal_pairs_are_asked_once_and_a_busy_server_again(url: str) -> None:
    before = _Server.asked["good"]
    for _ in range(3):
        assert judge("once?", "good", "4", url=url, model="m").reward == 0.9
    assert _Server.asked["good"] == before + 1
    with pytest.raises(ValueError, match="no score"):  # the third answer is "busy" itself
        judge("2 + 2?", "busy", "4", url=url, model="m")
    assert _Server.asked["busy"] == 3


def test_what_is_no_verdict_is_an_error(url: str) -> None:
    with pytest.raises(ValueError, match="no score"):
        judge("2 + 2?", "I cannot say", "4", url=url, model="m")
    with pytest.raises(ValueError, match="no score"):
        judge("2 + 2?", "cut off", "4", url=url, model="m")
    with pytest.raises(ValueError, match="99, which is not from 0 to best=10"):
        judge("2 + 2?", "over", "4", url=url, model="m")
    with pytest.raises(ValueError, match="must be JSON"):
        judge("2 + 2?", "garbage", "4", url=url, model="m")
    with pytest.raises(OSError, match="404"):
        judge("2 + 2?", "gone", "4", url=url, model="m")
    with pytest.raises(TimeoutError):
        judge("2 + 2?", "good", "4", url="http://127.0.0.1:9/v1", model="m", timeout_s=0.2)
