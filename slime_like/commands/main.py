"""The command ``slime-like``: errors for users as sentences, and exit codes.

Exit codes: 0 done; 1 the run failed; 2 the command, the configuration or the data is rejected; 130 interrupted
(Ctrl-C, SIGTERM, SIGHUP); 141 the reader of the output closed it.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence

from slime_like.commands.failure import keep_traceback
from slime_like.errors import FAILED, INTERRUPTED, OUTPUT_CLOSED, ConfigError, SlimeLikeError, exit_code
from slime_like.system.interrupts import InterruptHandler


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code. Errors are printed to standard error, one sentence each."""
    try:
        with keep_traceback(None):
            code = _imported()(sys.argv[1:] if argv is None else argv)
            sys.stdout.flush()
            return code
    except SlimeLikeError as error:
        problems = error.problems if isinstance(error, ConfigError) else [error]
        _complain([f"{problem} [{problem.code}]" for problem in problems], error)
        if exit_code(error) == FAILED:
            from slime_like.launch.restarts import leave_cause

            leave_cause(error.code, str(error), error.who, error.phase)
        return exit_code(error)
    except BrokenPipeError:  # as in `slime-like report RUN_DIR | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes when it exits
        return OUTPUT_CLOSED
    except KeyboardInterrupt as error:
        _complain(["interrupted"], error)
        return INTERRUPTED


def _imported() -> Callable[[Sequence[str]], int]:
    """Import the entry point. A handler notes interrupts during the import, because pydantic turns them into errors."""
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


def _complain(problems: Sequence[str], error: BaseException) -> None:
    """Print the problems, and the error's notes as the last lines."""
    several = [f"slime-like: {len(problems)} problems", *(f"  - {problem}" for problem in problems)]
    notes = [f"slime-like: {note}" for note in getattr(error, "__notes__", ())]
    lines = [f"slime-like: {problems[0]}"] if len(problems) == 1 else several
    print("\n".join([*lines, *notes]), file=sys.stderr)


def run_child(parent: int, argv: Sequence[str]) -> int:
    """Run ``slime-like`` in a child process that gets SIGTERM when its parent ends. Linux only."""
    from slime_like.sandbox.serving import die_with_parent

    die_with_parent(parent, by=signal.SIGTERM)
    return main(argv)


if __name__ == "__main__":
    sys.exit(main())
