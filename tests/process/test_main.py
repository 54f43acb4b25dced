"""An interrupt while the command is imported."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("disguise", [False, True])
def test_ctrl_c_is_understood_while_modules_are_imported(disguise: bool) -> None:
    """The signal arrives within an import that every command makes, whose module may make another error of it."""
    code = f"""
import os, signal, sys
from slime_like.commands.main import main

class Interrupted:
    def find_spec(self, name, *rest):
        if name != "pydantic":
            return
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            if not {disguise}:
                raise
        raise ValueError("KeyboardInterrupt, says a library")

sys.meta_path.insert(0, Interrupted())
sys.exit(main(["--version"]))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "slime-like: interrupted\n")
