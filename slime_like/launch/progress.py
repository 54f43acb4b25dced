"""What a node says while it takes part."""

from __future__ import annotations

import sys

from slime_like.launch.options import Place


def say(place: Place, text: str) -> None:
    """A line on standard error."""
    print(f"[slime-like] node {place.rank}: {text}", file=sys.stderr, flush=True)
