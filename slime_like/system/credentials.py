"""Credentials in settings and text: they are neither saved nor printed."""

import re
from typing import Any

_SECRET = re.compile(
    r"auth(?!or(?!iz))|cookie|secret|passw(?:or)?d|pass(?:phrase|code)|(?:^|[-_.])(?:pass|jwt|creds?)$|credential"
    r"|(?<!^)(?<!^old)pwd$|(?:api|access|private|encryption|signing)[-_.]?keys?",
    re.IGNORECASE,
)
_KEY = re.compile(r"(?<!mon)(?<!tur)(?<!hot)(?<!don)(?:key|token)s?(?:_value)?(?:_?\d+)?$|^(?:old)?pwd$", re.IGNORECASE)
_PUBLIC_KEY = re.compile(
    r"(?:^|[-_.])(?:input|label|prompt|answer|response|messages|images?|videos?|audio|tools?|metadata|reward|reward_fn"
    r"|question|ground_truth|data|group|environment|sort)[-_]key$"
    r"|(?:^|[-_.])(?:pad|eos|bos|unk|sep|cls|mask|stop|image)[-_]tokens?$",
    re.IGNORECASE,
)
"""Keys of a data file's rows, and tokens of a vocabulary."""
_NO_SECRET = re.compile(r"true|false|null|none", re.IGNORECASE)
_PLAIN_VALUE = re.compile(r"\d{1,9}|\d+\.\d+")
"""Of several tokens: ``max_tokens=512``."""
_NAMES = (
    re.compile(r"""(?<![\w.\\-])\\*["']?(?P<name>[\w.-]+)\\*["']?\]?\s*\+?(?P<sign>[:=])\s*"""),
    re.compile(r"(?<![\w.\\-])--?(?P<name>\w[\w.-]*)(?P<sign>\s)\s*"),
)
_QUOTED = r"""\\*"(?:[^"\\]|\\.)*"|'[^']*'|\[[^\]]*\]"""
_SCHEME = r"(?:(?i:bearer|basic|token)\s+)?"
_VALUES = {
    "=": re.compile(rf"{_QUOTED}|{_SCHEME}[^\s;&}}]+"),
    ":": re.compile(rf"{_QUOTED}|{_SCHEME}[^\s,;&}}]+"),
    " ": re.compile(rf"{_QUOTED}|[^\s-]\S*"),
}
_USER_OF_URL = re.compile(r"(?<=//)(?:[^/\s]*|[^/\s:@]+:\S{0,500})@")
_UNCLEAR = re.compile(r"(?<=//)[^/]*[?#][^/]*@.*")
"""A password, or a query, with any sign in it."""
_QUERY = re.compile(r"\?.*")
_BY_FORM = re.compile(
    r"(?<![\w-])(?:(?<=(?i:bearer) )\S+|(?<=(?i:basic) )\S+|(?<=: Token )\S+|hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}"
    r"|github_pat_\w{16,}|xox[abp]-[\w-]{10,}|AIza[\w-]{16,}|glpat-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|nvapi-[\w-]{16,}|gsk_\w{16,}"
    r"|npm_\w{16,}|[rs]k_(?:live|test)_\w{8,}|wandb_v\d_\w{16,}"
    r"|eyJ[\w-]+\.[\w-]+\.[\w-]*|(?<!/)[0-9a-f]{40}(?![\w/])|(?<=Signature=)[^\s&]+|(?<=sig=)[^\s&]+)"
)


def is_credential(name: str) -> bool:
    """Whether what has this name is one, by the words in it; keys of a data file's rows are none."""
    return _may_name_credential(name) and (_SECRET.search(name) is not None or not name.endswith(("s", "S")))


def shown_url(url: str) -> str:
    """A URL as it may be printed: without its user, and without its query."""
    return _QUERY.sub("?...", _USER_OF_URL.sub("...@", _UNCLEAR.sub("...", url)))


def without_credentials(name: str, value: Any) -> str:
    """The value of a setting as it may be printed: without what its name, a name inside of it or its form shows to be a
    credential, and without the user of a URL."""
    if is_credential(name):
        return "..."
    shown = str(value)
    for names in _NAMES:
        shown = _without_named(names, shown)
    return _USER_OF_URL.sub("...@", _BY_FORM.sub("...", shown))


def _without_named(names: re.Pattern[str], text: str) -> str:
    """Without the values behind these names."""
    kept, place = list[str](), 0
    for found in names.finditer(text):
        if found.end() < place or not _may_name_credential(found["name"]):
            continue
        value = _VALUES.get(found["sign"], _VALUES[" "]).match(text, found.end())
        if value and not _is_plain(found["name"], value[0].strip("\"'")):
            kept += [text[place : found.end()], "..."]
            place = value.end()
    return "".join([*kept, text[place:]])


def _is_plain(name: str, value: str) -> bool:
    """Whether the value is none of a credential."""
    if _NO_SECRET.fullmatch(value):
        return True
    if _SECRET.search(name):
        return False
    is_directory = name.lower().endswith("pwd") and value.startswith("/")
    return is_directory or (name.lower().endswith("s") and _PLAIN_VALUE.fullmatch(value) is not None)


def _may_name_credential(name: str) -> bool:
    return bool(_SECRET.search(name) or _KEY.search(name)) and _PUBLIC_KEY.search(name) is None
