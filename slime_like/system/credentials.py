"""Credentials in settings and text: they are neither saved nor printed."""

import re
from typing import Any

_NAME = re.compile(r"auth|cookie|keys?$|token$|secret|passw|pwd|credential", re.IGNORECASE)
_KEY_OF_ROWS = re.compile(
    r"(?:^|[-_.])(?:input|label|prompt|answer|response|messages|images?|videos?|audio|tools?|metadata|reward|reward_fn"
    r"|data|group|environment)[-_]key$"
)
_WORDS_FOR_ONE = r"(?:key|token|secret|passw(?:or)?d|pwd|credential)s?(?:_value)?"
_PLAIN_VALUE = r"(?!\d+(?:\.\d+)?(?:[\s,;&}\]]|$)|(?:true|false|null|none)\b)"
_NAMED_VALUE = re.compile(
    rf"""(\\*["']?(?P<name>[\w.-]*{_WORDS_FOR_ONE})\\*["']?\s*[:=]\s*){_PLAIN_VALUE}"""
    r"""(\\*"[^"]*"|'[^']*'|[^\s,;&}]+)""",
    re.IGNORECASE,
)
_OPTION = re.compile(rf"(--?(?P<name>[\w-]*{_WORDS_FOR_ONE})\s+){_PLAIN_VALUE}([^\s-]\S*)", re.IGNORECASE)
_USER_OF_URL = re.compile(r"(?<=//)(?:[^/\s]*|[^/\s:@]+:\S*)@")
_UNCLEAR = re.compile(r"(?<=//)[^/]*[?#][^/]*@.*")
"""A password, or a query, with any sign in it."""
_QUERY = re.compile(r"\?.*")
_BY_FORM = re.compile(
    r"(?<![\w-])(?:(?<=Bearer )\S+|(?<=Basic )\S+|(?<=: Token )\S+|hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}"
    r"|github_pat_\w{16,}|xox[abp]-[\w-]{10,}|AIza[\w-]{16,}|glpat-[\w-]{10,}|AKIA[0-9A-Z]{16}"
    r"|eyJ[\w-]+\.[\w-]+\.[\w-]*|[0-9a-f]{40}\b|(?<=Signature=)[^\s&]+|(?<=sig=)[^\s&]+)"
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
    named = str(value)
    for pattern in (_NAMED_VALUE, _OPTION):
        named = pattern.sub(lambda found: found[0] if _KEY_OF_ROWS.search(found["name"]) else f"{found[1]}...", named)
    return _USER_OF_URL.sub("...@", _BY_FORM.sub("...", named))
