"""``slime-like`` as a child that is terminated (SIGTERM) when its parent ends.

Run as ``python -m slime_like.commands.child_main PARENT_PID ARGUMENTS...``. Linux only, as is all of this.
"""

import ctypes
import os
import signal
import sys

from slime_like.commands.main import main

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):  # it was faster
        sys.exit(1)
    sys.exit(main(sys.argv[2:]))
