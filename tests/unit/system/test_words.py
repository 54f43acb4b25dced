"""Text of numbers."""

import pytest

from slime_like.system.words import memory_text, seconds_text, traffic_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (memory_text(13.8 * 2**30), "13.8 GiB"),
        (memory_text(2**30), "1.00 GiB"),
        (memory_text(2**30 - 1), "1.00 GiB"),
        (memory_text(1500 * 2**30), "1,500 GiB"),  # the unit of cluster.host_memory_gib
        (memory_text(-(2**20)), "-1.00 MiB"),
        (memory_text(0), "0 B"),
        (traffic_text(36_176.5e9), "36.2 TB"),
        (traffic_text(2.16e9), "2.16 GB"),
        (seconds_text(1911.4), "1,911 s"),
        (seconds_text(305_583), "84.9 h"),
        (seconds_text(0.0123), "12.3 ms"),
        (seconds_text(7e-6), "7.00 us"),
        (seconds_text(0), "0 s"),
    ],
)
def test_three_digits_and_a_unit(text: str, expected: str) -> None:
    assert text == expected
