"""A weight-sync check that cannot fail is worse than none: each way of failing, by name."""

import pytest

from slime_like.errors import WeightSyncError
from slime_like.interfaces import UpdateReceipt
from slime_like.orchestration.weight_sync import compare_checksums

SENT = {"a.weight": 1, "b.weight": 2}


def test_equal_hashes_pass() -> None:
    compare_checksums(SENT, UpdateReceipt(3, dict(SENT)), engine=0)


@pytest.mark.parametrize(
    ("received", "message"),
    [
        ({"a.weight": 1}, r"version 3, engine 1: b\.weight did not arrive"),
        ({**SENT, "c.weight": 5}, r"c\.weight was never sent"),
        ({"a.weight": 1, "b.weight": 7}, r"b\.weight arrived changed"),
    ],
)
def test_a_difference_names_the_tensor(received: dict[str, int], message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        compare_checksums(SENT, UpdateReceipt(3, received), engine=1)
