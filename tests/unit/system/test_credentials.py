"""Names of credentials, and URLs as they are printed."""

import pytest

from slime_like.system.credentials import is_credential, shown_url


def test_names_of_headers_and_queries() -> None:
    names = "X-Api-Key", "api_key", "key", "Authorization", "X-Auth-Token", "apiKey", "access_token", "Cookie", "pwd"
    others = "sort_keys", "Content-Type", "X-Request-Id", "author", "max_tokens", "model"
    assert all(map(is_credential, names)) and not any(map(is_credential, others))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://h:80/v1", "http://h:80/v1"), ("https://me:SECRET@h/v1", "https://...@h/v1"),
        ("http://h/v1?api_key=SECRET", "http://h/v1?..."), ("http://me:SEC/RET@h/x", "http://..."),
        ("http://me:SEC?RET@h", "http://..."), ("http://[SECRET", "..."),
    ],
)  # fmt: skip
def test_no_url_is_printed_with_its_user_or_query(url: str, shown: str) -> None:
    assert shown_url(url) == shown
