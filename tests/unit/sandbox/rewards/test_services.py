"""The HTTP reward and the judge, against a service on this host."""

import socket
import threading
import time
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from slime_like.interfaces.user_code import RewardResult
from slime_like.sandbox.rewards.registry import try_options
from slime_like.sandbox.rewards.services import judge, remote
from tests.support.reward_service import Service
from tests.support.reward_service import url as url

ask = partial(judge, "2 + 2?", answer="4", model="m")


def test_the_service_receives_everything_and_its_answer_becomes_the_result(
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
    for asked in ("text", "list", "none", "word"):
        with pytest.raises(ValueError, match="it must be"):
            remote("p", asked, "a", url=url)
    for asked in ("busy", *(f"redirect {status}" for status in (301, 302, 303, 307, 308))):
        with pytest.raises(OSError, match=f"{url}: HTTP Error"):
            remote("p", asked, "a", url=url)
    for asked, place in (("slow", url), ("plain", "http://127.0.0.1:9/")):
        with pytest.raises(TimeoutError, match=f"{place} gave no answer within timeout_s=0.2 s"):
            remote("p", asked, "a", url=place, timeout_s=0.2)


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
        *({"url": url} for url in ("file:///etc/passwd", 80, "http://me:SECRET@a", "http://a/?api_key=SECRET")),
        {"timeout_s": "4"},
        {"headers": "X-Key: 1"},
        {"headers": {"Authorization": "Bearer SECRET"}},
        {"headers_from": {"Authorization": "NOT_SET_ANYWHERE"}},
    ],
)
def test_unusable_options_are_rejected_before_anything_starts(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"url|timeout_s|headers") as caught:
        try_options("http", remote, {"url": "http://a"} | options)
    assert "SECRET" not in str(caught.value)


# --------------------------------------------------------------------------------------------------------------- judge
def test_the_score_is_scaled_and_bounded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_AUTH", "Bearer secret")
    good = ask("good", url=f"{url}/", headers_from={"Authorization": "JUDGE_AUTH"})
    assert (good.reward, good.success) == (0.9, True) and good.metadata == {"judgement": "It is.\nScore: 9"}
    body, key, path = Service.judged[-1]
    assert (body["model"], body["temperature"], key, path) == ("m", 0, "Bearer secret", "/score/chat/completions")
    bad = ask("bad", url=url)
    assert (bad.reward, bad.success) == (0.25, False) and ask("bad", url=url, success_from=0.25).success
    assert [ask(word, url=url).reward for word in ("bold", "thought")] == [0.7, 0.8]
    assert ask("mark 7", url=url, pattern=r"mark (\d)", best=7).reward == 1.0


@pytest.mark.parametrize(("host", "is_direct"), [("127.0.0.1", True), ("localhost", True), ("localhost.test", False)])
def test_services_on_this_host_are_called_without_a_proxy(
    url: str, monkeypatch: pytest.MonkeyPatch, host: str, is_direct: bool
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # refuses connections
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        call = partial(remote, "", "fine", "", url=url.replace("127.0.0.1", host), timeout_s=2.0)
        if is_direct:
            assert call().reward == 1.0
            return
        with pytest.raises(TimeoutError, match="refused"):
            call(timeout_s=0.05)


def test_a_response_cannot_write_the_message(url: str) -> None:
    """Names that it spells are not replaced."""
    ask("good\n{answer} {prompt}", url=url, instructions="{answer}<response>\n{response}")
    assert Service.judged[-1][0]["messages"][0]["content"] == "4<response>\ngood\n{answer} {prompt}"


def test_a_response_without_a_reference_answer_is_judged(url: str) -> None:
    judge("Say it.", "good", "", url=url, model="m")
    message = Service.judged[-1][0]["messages"][0]["content"]
    assert "reference" not in message and "Say it." in message and "good" in message and "{" not in message


def test_equal_pairs_are_asked_once_and_a_busy_server_again(url: str) -> None:
    before = Service.asked["good"]
    for _ in range(3):
        assert judge("once?", "good", "4", url=url, model="m").reward == 0.9
    assert Service.asked["good"] == before + 1
    with pytest.raises(ValueError, match="no score"):  # the third answer is "busy" itself
        ask("busy", url=url)
    assert Service.asked["busy"] == 3


def test_a_refusal_is_quoted_and_its_parameter_can_be_left_out(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service's words are bounded and printable, and do not repeat the key."""
    monkeypatch.setenv("JUDGE_AUTH", "Bearer secret")
    asked = partial(ask, "refused", url=url, headers_from={"Authorization": "JUDGE_AUTH"})
    for options in ({}, {"max_tokens": None}, {"parameters": {"temperature": None}}):
        with pytest.raises(OSError, match=r"HTTP Error 400: .*Unsupported.*parameter of ") as caught:
            asked(**options)
        said = str(caught.value)
        assert said.isprintable() and "secret" not in said and len(said) < 400
    with pytest.raises(ValueError, match="no score"):  # the answer is "refused" itself
        asked(max_tokens=None, parameters={"temperature": None, "max_completion_tokens": 9})
    assert Service.judged[-1][0].keys() == {"model", "messages", "max_completion_tokens"}


@pytest.mark.parametrize(
    ("response", "error", "words"),
    [
        ("I cannot say", ValueError, "no score"),
        ("cut off", ValueError, "no score"),
        ("over", ValueError, "99, which is not from 0 to best=10"),
        ("garbage", ValueError, "must be JSON"),
        ("gone", OSError, "404"),
    ],
)
def test_an_answer_without_a_verdict_is_an_error(url: str, response: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ask(response, url=url)
