"""End of a node: its verdict, which all nodes share, and the note it leaves for nodes that Ray doesn't connect to it.

A node that ends before Ray connects it leaves a note. The nodes that wait for it read the note and end, too. Each node
removes its note of an earlier start. Until then, that note counts only if the node stays away for a while, and only
while it is younger than the wait for nodes.
"""

import json
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from slime_like.config.launch import LaunchOptions, launch_directory
from slime_like.errors import FAILED, ConfigError, LaunchError, SlimeLikeError, exit_code
from slime_like.system.disk import write_private


@dataclass(frozen=True, slots=True)
class Verdict:
    """Exit code of every node, and the cause if it is not 0."""

    code: int
    sentence: str = ""


class NodeEndedError(LaunchError):
    """Another node has ended the run. This node ends with the same ``verdict``."""

    code = "node-ended"

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        super().__init__(verdict.sentence)


class RefusedError(LaunchError):
    """Rejection of this node by a run, which continues without it."""

    code = "rank-refused"


def failure(error: Exception, who: str = "") -> Verdict:
    """Return the verdict of a run that ``error`` has ended. ``who`` is the node, if the error doesn't name it."""
    if isinstance(error, NodeEndedError):
        return error.verdict
    if not isinstance(error, SlimeLikeError):
        return Verdict(FAILED, f"{who}: {type(error).__name__}: {error}")
    sentence = "; ".join(map(str, error.problems)) if isinstance(error, ConfigError) else str(error)
    return Verdict(exit_code(error), f"{who}: {sentence}" if who else sentence)


class ExitNotes:
    """Note of this node, and notes that the other nodes leave from now on. Removes this node's earlier note."""

    def __init__(self, run_dir: Path, options: LaunchOptions) -> None:
        self._paths = [launch_directory(run_dir) / f"ended-{rank}.json" for rank in range(options.nodes)]
        self._own = self._paths[options.node_rank]
        with suppress(NotADirectoryError):
            self._own.unlink(missing_ok=True)
        self._earlier = [_modified(path) for path in self._paths]
        self._return_at = time.monotonic() + 2 * options.silence_s
        self._patience_s = options.nodes_timeout_s

    def leave(self, verdict: Verdict) -> None:
        """Write the note. A failure is reported on standard error, since this node ends in any case."""
        try:
            write_private(self._own, json.dumps(asdict(verdict)))
        except OSError as error:
            why = f"other nodes will not learn why this one has ended: {self._own} cannot be written"
            print(f"[slime-like] {why} ({error.strerror})", file=sys.stderr, flush=True)

    def require_none_ended(self, ranks: Iterable[int] = (0,)) -> None:
        """Check the notes of these nodes.

        Raises ``NodeEndedError`` if a node left a note in this start, or shortly before it and did not return.
        """
        for rank in ranks:
            modified = _modified(self._paths[rank])
            if modified is None:
                continue
            if modified != self._earlier[rank]:
                raise NodeEndedError(self._read(rank))
            age_s = max(0.0, time.time() - modified)
            if age_s < self._patience_s and time.monotonic() > self._return_at:
                note, ago = self._read(rank), f"node {rank} ended {age_s:.0f} s ago and was not restarted"
                raise NodeEndedError(Verdict(note.code, f"{ago}: {note.sentence}"))

    def _read(self, rank: int) -> Verdict:
        try:
            return Verdict(**json.loads(self._paths[rank].read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError) as error:
            return Verdict(1, f"node {rank} has ended, and {self._paths[rank]} does not say why ({error})")


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:  # no note, or no directory yet
        return None
