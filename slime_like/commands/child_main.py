"""``slime-like`` in a child process that gets SIGTERM when its parent ends. Linux only.

Run as ``python -m slime_like.commands.child_main PARENT_PID ARGUMENTS...``.
"""

import ctypes
import os
import signal
import sys

from slime_like.commands.main import main

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):  # the parent ended before
        sys.exit(1)
    sys.exit(main(sys.argv[2:]))
