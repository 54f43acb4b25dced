"""A reward that a service computes: one POST per response, JSON in, JSON out."""

import json
import math
import os
import time
import urllib.request
from collections.abc import Container, Mapping
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import parse_qsl, urlsplit

from slime_like.interfaces.reward import RewardResult
from slime_like.system.credentials import is_credential

_MAX_BYTES = 1 << 20
_PAUSE_S = 0.1


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would send the headers to another service, whose answer would be the reward."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def remote(
    prompt: str,
    response: str,
    answer: str,
    *,
    url: str,
    timeout_s: float = 4.0,
    headers: Mapping[str, str] | None = None,
    headers_from: Mapping[str, str] | None = None,
) -> RewardResult:
    """POST ``{"prompt", "response", "answer"}`` to ``url``; it answers ``{"reward": x, "success": true}``.

    Without ``success``, a reward above 0 is a success. Other keys become metadata.

    Args:
        prompt, response, answer: as for every reward function.
        url: begins with http:// or https://.
        timeout_s: bound on connecting, and on every wait for bytes; keep it below ``reward.timeout_s``. Within it,
            requests to an unreachable service are repeated.
        headers: sent with the request, and saved with the configuration: credentials are rejected.
        headers_from: header to the environment variable that has its value, e.g. ``{Authorization: JUDGE_AUTH}``.

    Returns:
        The service's reward, success and metadata.

    Raises:
        TimeoutError: no answer in time, or no connection.
        OSError: no such host, or a status that is not 2xx.
        ValueError: an answer that is not such JSON, or options of another kind.
    """
    check_service(url, timeout_s, headers, headers_from)
    body = json.dumps({"prompt": prompt, "response": response, "answer": answer})
    values = post(url, body, timeout_s, headers, headers_from)
    try:
        reward = float(values.pop("reward"))
        success = values.pop("success", reward > 0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{url} answered {str(values)[:100]}; it must be JSON with a number as reward") from error
    if success not in (True, False):  # "false" would be a success
        raise ValueError(f"{url} answered success={success!r}; it must be true or false")
    return RewardResult(reward, bool(success), values)


def post(
    url: str,
    body: str,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    headers_from: Mapping[str, str] | None = None,
    retried: Container[int] = (),
) -> Any:
    """Return the value of the JSON that the service answers.

    A refused or broken connection is retried, because the service may be starting; so are answers of status
    ``retried``.

    Raises:
        TimeoutError: no answer within ``timeout_s``.
        OSError: no such host, or another status that is not 2xx.
        ValueError: the answer is not JSON, or longer than 1 MiB.
    """
    secret = {name: os.environ[variable] for name, variable in (headers_from or {}).items()}
    sent = {"Content-Type": "application/json", **(headers or {}), **secret}
    content = _posted(urllib.request.Request(url, body.encode(), sent), timeout_s, retried)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"{url} answered more than {_MAX_BYTES} bytes")
    try:
        return json.loads(content)
    except ValueError as error:
        raise ValueError(f"{url} answered {content[:100]!r}; it must be JSON") from error


def _posted(request: urllib.request.Request, timeout_s: float, retried: Container[int]) -> bytes:
    url, deadline = request.full_url, time.monotonic() + timeout_s
    while True:
        try:
            with _OPENER.open(request, timeout=max(deadline - time.monotonic(), _PAUSE_S)) as reply:
                return reply.read(_MAX_BYTES + 1)
        except OSError as error:
            reason = error.reason if isinstance(error, URLError) else error  # the connection's error is inside
            is_busy = isinstance(error, HTTPError) and error.code in retried
            if not is_busy and not isinstance(reason, TimeoutError | ConnectionError):
                raise OSError(f"{url}: {error}") from error
            if isinstance(reason, TimeoutError) or time.monotonic() + _PAUSE_S >= deadline:
                why = "" if isinstance(reason, TimeoutError) else f" ({reason})"
                raise TimeoutError(f"{url} gave no answer within timeout_s={timeout_s:g} s{why}") from error
        time.sleep(_PAUSE_S)


def check_service(
    url: str,
    timeout_s: float = 4.0,
    headers: Mapping[str, str] | None = None,
    headers_from: Mapping[str, str] | None = None,
) -> None:
    """Raise ``ValueError`` where no request could be made with these options; nothing is sent. No value is quoted."""
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise ValueError("url is neither http nor https")
    parts = urlsplit(url)
    queried = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    if "@" in parts.netloc or any(map(is_credential, queried)):
        raise ValueError("url holds a credential, which would be saved; send it by headers_from")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s={timeout_s!r} must be a number of seconds above 0")
    for option, given in (("headers", headers), ("headers_from", headers_from)):
        if given is not None and not (
            isinstance(given, Mapping) and all(isinstance(one, str) for one in given.values())
        ):
            raise ValueError(f"{option} must be a mapping of names to text")
    if found := [name for name in headers or {} if is_credential(name)]:
        raise ValueError(f"headers: {found[0]} is a credential; use headers_from: {{{found[0]}: ENVIRONMENT_VARIABLE}}")
    for name, variable in (headers_from or {}).items():
        value = os.environ.get(variable)
        if not value or not value.isprintable():
            problem = "holds characters that a header cannot have" if value else "is not set"
            raise ValueError(f"headers_from: the environment variable of {name}, {variable}, {problem}")
