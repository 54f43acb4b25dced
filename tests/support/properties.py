"""How many random examples a property test draws."""

from typing import Any

from hypothesis import settings

_HYPOTHESIS_DEFAULT = 100


def examples(count: int, **more: Any) -> settings:
    """``count`` examples in the suite; in another profile the same multiple of it as of Hypothesis's default."""
    return settings(max_examples=count * settings().max_examples // _HYPOTHESIS_DEFAULT, **more)
