"""Large products go to oneDNN, in a separate process."""

import subprocess
import sys

from tests.unit.cpu.test_onednn import WHICH


def test_large_products_go_to_onednn_while_it_lasts() -> None:
    """In a separate process: in this one an engine may have asked for it, for good."""
    done = subprocess.run([sys.executable, "-c", WHICH], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "True", "False"]
