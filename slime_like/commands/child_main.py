"""``slime-like`` in a child process that gets SIGTERM when its parent ends. Linux only.

Run as ``python -m slime_like.commands.child_main PARENT_PID ARGUMENTS...``.
"""

import signal
import sys

from slime_like.commands.main import main
from slime_like.sandbox.serving import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), by=signal.SIGTERM)
    sys.exit(main(sys.argv[2:]))
