"""A weight-sync check that cannot fail is worse than none: each way of failing, by name."""

import pytest

from slime_like.errors import WeightSyncError
from slime_like.interfaces import UpdateReceipt
from slime_like.orchestration.weight_sync import compare_checksums
from tests.support.rejections import Rejects

SENT = {"a.weight": 1, "b.weight": 2}


def test_equal_hashes_pass() -> None:
    compare_checksums(SENT, UpdateReceipt(3, dict(SENT)), engine=0)


@pytest.mark.parametrize(
    "received",
    [{"a.weight": 1}, {**SENT, "c.weight": 5}, {"a.weight": 1, "b.weight": 7}],
    ids=["missing", "more", "changed"],
)
def test_a_difference_names_the_tensor(received: dict[str, int], rejects: Rejects) -> None:
    with rejects(WeightSyncError, "tensors-differ"):
        compare_checksums(SENT, UpdateReceipt(3, received), engine=1)
