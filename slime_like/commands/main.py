"""The command ``slime-like``: errors meant for people as sentences, and exit codes.

Exit codes: 0 done; 1 the run failed; 2 the command, the configuration or the data is rejected; 130 interrupted
(Ctrl-C); 141 the reader of the output closed it.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence

from slime_like.commands.failure import notes_of, traceback_kept
from slime_like.errors import INTERRUPTED, OUTPUT_CLOSED, ConfigError, SlimeLikeError, exit_code
from slime_like.system.interrupts import InterruptHandler


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; errors go to standard error as one sentence each, without traceback.

    Args:
        argv: its arguments; ``None`` takes this process's.
    """
    try:
        with traceback_kept(None):
            code = _imported()(sys.argv[1:] if argv is None else argv)
            sys.stdout.flush()
            return code
    except SlimeLikeError as error:
        problems = error.problems if isinstance(error, ConfigError) else [error]
        _complain([f"{problem} [{problem.code}]" for problem in problems], notes_of(error))
        return exit_code(error)
    except BrokenPipeError:  # as in `slime-like report RUN_DIR | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return OUTPUT_CLOSED
    except KeyboardInterrupt as error:
        _complain(["interrupted"], notes_of(error))
        return INTERRUPTED


def _imported() -> Callable[[Sequence[str]], int]:
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


def _complain(problems: Sequence[str], notes: Sequence[str]) -> None:
    """Print the problems, and ``notes`` as the last lines."""
    if len(problems) == 1:
        print(f"slime-like: {problems[0]}", file=sys.stderr)
    else:
        print(f"slime-like: {len(problems)} problems", file=sys.stderr)
        for problem in problems:
            print(f"  - {problem}", file=sys.stderr)
    for note in notes:
        print(f"slime-like: {note}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
