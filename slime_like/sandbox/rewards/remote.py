"""A reward that a service computes: one POST per response, JSON in, JSON out."""

import json
import math
import time
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.error import URLError

from slime_like.interfaces.reward import RewardResult

_MAX_BYTES = 1 << 20
_PAUSE_S = 0.1


def remote(
    prompt: str,
    response: str,
    answer: str,
    *,
    url: str,
    timeout_s: float = 4.0,
    headers: Mapping[str, str] | None = None,
) -> RewardResult:
    """POST ``{"prompt", "response", "answer"}`` to ``url``; it answers ``{"reward": x, "success": true}``.

    Without ``success``, a reward above 0 is a success. Other keys become metadata.

    Args:
        prompt, response, answer: as for every reward function.
        url: begins with http:// or https://.
        timeout_s: bound on connecting, and on every wait for bytes; keep it below ``reward.timeout_s``. Within it a
            request is repeated while the service is unreachable, so that a restart of it costs no reward.
        headers: sent with the request, e.g. an authorization.

    Returns:
        The service's reward, success and metadata.

    Raises:
        TimeoutError: no answer in time, or no connection.
        OSError: no such host, or a status that is not 2xx.
        ValueError: an answer that is not such JSON, or options of another kind.
    """
    check_service(url, timeout_s, headers)
    body = json.dumps({"prompt": prompt, "response": response, "answer": answer}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **(headers or {})})
    return _result(url, _post(request, timeout_s))


def _post(request: urllib.request.Request, timeout_s: float) -> bytes:
    """The service's answer. A refused or broken connection is retried: the service may be starting."""
    url, deadline = request.full_url, time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(request, timeout=max(deadline - time.monotonic(), _PAUSE_S)) as reply:
                return reply.read(_MAX_BYTES + 1)
        except OSError as error:
            reason = error.reason if isinstance(error, URLError) else error  # the connection's error is inside
            if not isinstance(reason, TimeoutError | ConnectionError):
                raise OSError(f"{url}: {error}") from error
            if isinstance(reason, TimeoutError) or time.monotonic() + _PAUSE_S >= deadline:
                why = "" if isinstance(reason, TimeoutError) else f" ({reason})"
                raise TimeoutError(f"{url} gave no answer within timeout_s={timeout_s:g} s{why}") from error
        time.sleep(_PAUSE_S)


def check_service(url: str, timeout_s: float = 4.0, headers: Mapping[str, str] | None = None) -> None:
    """Raise ``ValueError`` where no request could be made with these options; nothing is sent."""
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise ValueError(f"url={url!r} is neither http nor https")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s={timeout_s!r} must be a number of seconds above 0")
    if headers is not None and not isinstance(headers, Mapping):
        raise ValueError(f"headers={headers!r} is no mapping of names to values")


def _result(url: str, content: bytes) -> RewardResult:
    if len(content) > _MAX_BYTES:
        raise ValueError(f"{url} answered more than {_MAX_BYTES} bytes")
    try:
        values: dict[str, Any] = json.loads(content)
        reward = float(values.pop("reward"))
        success = values.pop("success", reward > 0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{url} answered {content[:100]!r}; it must be JSON with a number as reward") from error
    if success not in (True, False):  # "false" would be a success
        raise ValueError(f"{url} answered success={success!r}; it must be true or false")
    return RewardResult(reward, bool(success), values)
