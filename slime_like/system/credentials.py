"""Credentials in settings and text: they are neither saved nor printed."""

import re
from typing import Any

_NAME = re.compile(r"auth|cookie|key$|token$|secret|passw|credential", re.IGNORECASE)
_KEY_OF_ROWS = re.compile(
    r"(?:^|[-_.])(?:input|label|prompt|answer|response|messages|images?|videos?|audio|tools?|metadata|reward|reward_fn"
    r"|data|group|environment)[-_]key$"
)
_NAMED_VALUE = re.compile(
    r"""(["']?[\w.-]*(?:key|token|secret|passw(?:or)?d|credential)["']?\s*[:=]\s*)("[^"]*"|'[^']*'|[^\s,;&}]+)""",
    re.IGNORECASE,
)
_USER_OF_URL = re.compile(r"(?<=//)[^/\s]*@")
_UNCLEAR = re.compile(r"(?<=//)[^/]*[?#][^/]*@.*")
"""A password, or a query, with any sign in it."""
_QUERY = re.compile(r"\?.*")
_BY_FORM = re.compile(
    r"(?<![\w-])(?:(?<=Bearer )\S+|(?<=Basic )\S+|hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|AKIA[0-9A-Z]{16}"
    r"|(?<=Signature=)[^\s&]+|(?<=sig=)[^\s&]+)"
)


def is_credential(name: str) -> bool:
    """Whether what has this name is one, by the words in it; keys of a data file's rows are none."""
    return _NAME.search(name) is not None and _KEY_OF_ROWS.search(name) is None


def shown_url(url: str) -> str:
    """A URL as it may be printed: without its user, and without its query."""
    return _QUERY.sub("?...", _USER_OF_URL.sub("...@", _UNCLEAR.sub("...", url)))


def without_credentials(name: str, value: Any) -> str:
    """The value of a setting as it may be printed: without what its name, a name inside of it or its form shows to be a
    credential, and without the user of a URL."""
    if is_credential(name):
        return "..."
    named = _NAMED_VALUE.sub(r"\1...", str(value))
    return _USER_OF_URL.sub("...@", _BY_FORM.sub("...", named))
