"""How the command ends: interrupts, handlers, threads."""

import subprocess
import sys

import pytest

_LEAVING = """
import atexit, sys, threading, time
from slime_like.commands.main import main

def work():
    time.sleep({work_s})
    print("worked")

atexit.register(print, "handler")
if {work_s}:
    threading.Thread(target=work).start()
sys.argv = ["slime-like", "report", "nowhere"]
sys.exit(main())
"""


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


@pytest.mark.parametrize(("work_s", "said"), [(0, "handler\n"), (0.5, "worked\nhandler\n")])
def test_a_command_ends_with_its_handlers_run_its_words_out_and_its_threads_done(work_s: float, said: str) -> None:
    code = _LEAVING.format(work_s=work_s)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (1, said)
    assert ran.stderr.startswith("slime-like: ")
