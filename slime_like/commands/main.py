"""The command ``slime-like``: errors meant for people as sentences, and exit codes.

Exit codes: 0 done; 1 the run failed; 2 the command or the configuration is rejected; 130 interrupted (Ctrl-C).
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from slime_like.commands.failure import traceback_kept
from slime_like.errors import INTERRUPTED, ConfigError, SlimeLikeError, exit_code
from slime_like.system.interrupts import InterruptHandler


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; errors go to standard error as one sentence each, without traceback.

    Args:
        argv: its arguments; none takes this process's own, and the process ends here.
    """
    if argv is not None:
        return _run(argv)
    code = _run(sys.argv[1:])
    _leave(code)
    return code


def _run(argv: Sequence[str]) -> int:
    try:
        with traceback_kept(None):
            return _imported()(list(argv))
    except SlimeLikeError as error:
        _complain(error.problems if isinstance(error, ConfigError) else [f"{error} [{error.code}]"])
        return exit_code(error)
    except KeyboardInterrupt:
        _complain(["interrupted"])
        return INTERRUPTED


def _imported() -> Callable[[list[str]], int]:
    """Import the subcommands' entry point. A handler notes interrupts during the import, since pydantic turns them
    into errors."""
    handler = InterruptHandler()
    before = signal.signal(signal.SIGINT, handler)
    try:
        from slime_like.commands.root import run
    except Exception as error:
        if handler.noted:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    return run


def _leave(code: int) -> None:
    """Exit without destroying the objects of imported packages, which takes half a second. A process with other live
    threads exits as usual: Python waits for them."""
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.current_thread()):
        return
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _complain(problems: Sequence[str]) -> None:
    if len(problems) == 1:
        print(f"slime-like: {problems[0]}", file=sys.stderr)
        return
    print(f"slime-like: {len(problems)} problems", file=sys.stderr)
    for problem in problems:
        print(f"  - {problem}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
