"""Names of headers and query parameters whose values are neither saved nor printed, and URLs without them."""

from urllib.parse import urlsplit

_ENDS = ("auth", "authorization", "cookie", "key", "password", "passwd", "pwd", "secret", "signature", "token")


def is_credential(name: str) -> bool:
    """Return whether a header or query parameter of this name holds a credential, such as ``X-Api-Key``."""
    return name.lower().endswith(_ENDS)


def shown_url(url: str) -> str:
    """Return a URL as it may be printed: without its user and without its query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "..."
    if "@" in url.partition("//")[2].removeprefix(parts.netloc):  # a password with a slash, "?" or "#" in it
        return f"{parts.scheme}://..."
    user, _, host = parts.netloc.rpartition("@")
    query = "?..." if parts.query else ""
    return f"{parts.scheme}://{'...@' if user else ''}{host}{parts.path}{query}"
