"""Slurm's node lists, names of credentials, and URLs as they are printed."""

import pytest

from slime_like.system.network import MOST_NODES, expand_node_list, is_credential, shown_url


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node", "node"),
        ("node1,node2", "node1 node2"),
        ("node[01-03,07],gpu-a[1-2]b", "node01 node02 node03 node07 gpu-a1b gpu-a2b"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[3,1,2]", "n3 n1 n2"),
        ("rack[1-2]node[01-02]", "rack1node01 rack1node02 rack2node01 rack2node02"),
        ("a-b.c[5]-x,y", "a-b.c5-x y"),
        (" n1 , n[2-3] ", "n1 n2 n3"),
    ],
)
def test_node_list_is_expanded(text: str, expected: str) -> None:
    """Expected values are the output of ``scontrol show hostnames``."""
    assert expand_node_list(text) == expected.split()


@pytest.mark.parametrize(
    "text",
    [
        *("", "a,,b", "n[1-2", "n1]", "n[[1]]", "n[3-1]", "n[]", "n[a-b]", "n[1-2-3]"),
        *(f"n[0-{MOST_NODES}]", "n[1-1000]m[1-1000]"),
    ],
)
def test_node_list_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="node list"):
        expand_node_list(text)


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
