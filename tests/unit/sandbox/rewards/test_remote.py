"""The HTTP reward, against a service on this host: values, and every way in which it may fail."""

import socket
import threading
import time
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from slime_like.interfaces.reward import RewardResult
from slime_like.sandbox.rewards.registry import try_options
from slime_like.sandbox.rewards.remote import remote
from tests.support.reward_service import Service
from tests.support.reward_service import url as url


def test_the_service_sees_everything_and_its_answer_becomes_the_result(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert remote("p", "plain", "a", url=url) == RewardResult(0.5, True)
    assert remote("p", "zero", "a", url=url) == RewardResult(0.0, False)
    assert remote("p", "failed", "a", url=url) == RewardResult(2.0, False, {"why": "too long"})
    result = remote("the prompt", "r\u00e9ponse", "42", url=url, headers_from={"X-Key": "JUDGE_KEY"})
    assert result.metadata["seen"] == {"prompt": "the prompt", "response": "r\u00e9ponse", "answer": "42"}
    assert result.metadata["key"] == "secret"


def test_a_service_that_fails(url: str) -> None:
    for asked in ("text", "list", "none"):
        with pytest.raises(ValueError, match="it must be JSON"):
            remote("p", asked, "a", url=url)
    with pytest.raises(OSError, match=f"{url}: HTTP Error 503"):
        remote("p", "busy", "a", url=url)
    with pytest.raises(TimeoutError, match=f"{url} gave no answer within timeout_s=0.2 s"):
        remote("p", "slow", "a", url=url, timeout_s=0.2)
    with pytest.raises(TimeoutError, match=r"http://127.0.0.1:9/ gave no answer within timeout_s=0.2 s .* refused"):
        remote("p", "plain", "a", url="http://127.0.0.1:9/", timeout_s=0.2)
    with pytest.raises(ValueError, match="success='false'; it must be true or false"):
        remote("p", "word", "a", url=url)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(url: str, status: int) -> None:
    with pytest.raises(OSError, match=f"HTTP Error {status}"):
        remote("p", f"redirect {status}", "a", url=url)


def test_a_service_that_is_restarted_costs_no_reward() -> None:
    results: list[RewardResult] = []
    with socket.socket() as place:  # bound, not listening: connections are refused, and no other process gets the port
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        asking = threading.Thread(target=lambda: results.append(remote("p", "plain", "a", url=url, timeout_s=30)))
        asking.start()
        time.sleep(0.2)
        with ThreadingHTTPServer(("127.0.0.1", port), Service) as server:
            serving = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
            serving.start()
            asking.join(30)
            server.shutdown()
            serving.join(30)
    assert results == [RewardResult(0.5, True)]


@pytest.mark.parametrize(
    "options",
    [
        {"url": "file:///etc/passwd"},
        {"url": 80},
        {"url": "http://a", "timeout_s": "4"},
        {"url": "http://a", "headers": "X-Key: 1"},
        {"url": "http://a", "headers": {"Authorization": "Bearer SECRET"}},
        {"url": "http://a", "headers_from": {"Authorization": "NOT_SET_ANYWHERE"}},
        {"url": "http://me:SECRET@a"},
        {"url": "http://a/?api_key=SECRET"},
    ],
)
def test_other_options_are_rejected_before_anything_starts(options: dict[str, Any]) -> None:
    for request in (lambda: try_options("http", remote, options), lambda: remote("p", "r", "a", **options)):
        with pytest.raises(ValueError, match=r"url|timeout_s|headers") as caught:
            request()
        assert "SECRET" not in str(caught.value)
