"""A reward that a service computes: one POST per response, JSON in, JSON out."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import Any

from slime_like.rewards.result import RewardResult

_MAX_BYTES = 1 << 20


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

    Args:
        prompt, response, answer: as for every reward function.
        url: http or https.
        timeout_s: bound on connecting, and on every wait for bytes; keep it below ``reward.timeout_s``.
        headers: sent with the request, e.g. an authorization.

    Returns:
        The service's reward and success; without "success", a reward above 0 is one. Other keys become metadata.

    Raises:
        OSError: no connection, a status that is not 2xx, or no answer in time.
        ValueError: an answer that is not such JSON, or a url of another kind.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url={url!r} is neither http nor https")
    body = json.dumps({"prompt": prompt, "response": response, "answer": answer}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **(headers or {})})
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        return _result(url, reply.read(_MAX_BYTES + 1))


def _result(url: str, content: bytes) -> RewardResult:
    if len(content) > _MAX_BYTES:
        raise ValueError(f"{url} answered more than {_MAX_BYTES} bytes")
    try:
        values: dict[str, Any] = json.loads(content)
        reward = float(values.pop("reward"))
        success = bool(values.pop("success", reward > 0))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{url} answered {content[:100]!r}; it must be JSON with a number as reward") from error
    return RewardResult(reward, success, values)
