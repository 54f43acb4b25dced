"""Products by oneDNN replace torch's during the lifetime of a handle."""

from tests.process.conftest import python

WHICH = """
import gc, torch
from slime_like.system.onednn import replaced_products

def by_onednn():
    a = torch.ones(300, 300)
    with torch.profiler.profile() as profile:
        torch.mm(a, a)
    return "mkldnn::_linear_pointwise" in [event.key for event in profile.key_averages()]

print(by_onednn())
kept = replaced_products()
print(by_onednn())
del kept
gc.collect()
print(by_onednn())
"""


def test_large_products_use_onednn_during_the_handles_lifetime() -> None:
    """An engine may have replaced them permanently in the test process."""
    assert python(WHICH).split() == ["False", "True", "False"]
