"""What a node leaves for those that it could not tell: that it has ended before they met, and why.

A node that ends before it has reached the others (its configuration is refused, its port is taken) would be waited for
until patience ends. So it leaves its last words beside the key, which all nodes see, and whoever awaits it reads them.
Words of an earlier start lie there as well: a node takes its own away when it is started again, and until then they
count only if it stays away for a while, and not at all once they are older than anybody would have waited.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from dataclasses import asdict
from pathlib import Path

from slime_like.errors import LaunchError
from slime_like.launch.cluster_key import key_path
from slime_like.launch.messages import Verdict
from slime_like.launch.options import LaunchOptions


class NodeEndedError(LaunchError):
    """A node that is awaited has ended; ``verdict`` is how, for who awaits it to end likewise."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        super().__init__(verdict.sentence)


def words_path(run_dir: Path, rank: int) -> Path:
    """Where node ``rank`` leaves them."""
    return key_path(run_dir).with_name(f"ended-{rank}.json")


class LastWords:
    """A node's own."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path = words_path(run_dir, rank)

    def take_back(self) -> None:
        """This node is started (again).

        Raises:
            LaunchError: those of an earlier start cannot be removed.
        """
        try:
            self._path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise LaunchError(
                f"{self._path} cannot be removed ({error.strerror}), and tells the other nodes that this one has ended"
            ) from error

    def leave(self, verdict: Verdict) -> str:
        """Write them, whole or not at all. Returns why that could not be done, else ""."""
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.write_text(json.dumps(asdict(verdict)), encoding="utf-8")
            draft.replace(self._path)
        except OSError as error:
            return f"{self._path} cannot be written ({error.strerror})"
        return ""

    def leave_or_complain(self, verdict: Verdict) -> None:
        """Write them, or say on standard error that it could not be done: this node ends in any case."""
        problem = self.leave(verdict)
        if problem:
            why = f"other nodes will not learn why this one has ended: {problem}"
            print(f"[slime-like] {why}", file=sys.stderr, flush=True)


class Awaited:
    """Another node's, for who awaits it."""

    def __init__(self, run_dir: Path, rank: int, return_s: float, patience_s: float) -> None:
        """
        Args:
            return_s: words that lie there already count once the node has stayed away for so many seconds.
            patience_s: older words, in seconds, belong to another day.
        """
        self._path = words_path(run_dir, rank)
        self._rank = rank
        self._return_at = time.monotonic() + return_s
        self._patience_s = patience_s
        self._earlier = self._modified()

    @classmethod
    def of_start(cls, run_dir: Path, rank: int, options: LaunchOptions) -> Awaited:
        """Of node ``rank`` in a start with ``options``."""
        return cls(run_dir, rank, 2 * options.silence_s, options.nodes_timeout_s)

    def require_not_ended(self) -> None:
        """
        Raises:
            NodeEndedError: it has ended.
        """
        modified = self._modified()
        if modified is None:
            return
        age_s = max(0.0, time.time() - modified)
        if modified != self._earlier:
            raise NodeEndedError(self._words())
        if age_s < self._patience_s and time.monotonic() > self._return_at:
            words = self._words()
            raise NodeEndedError(
                Verdict(
                    words.code,
                    f"node {self._rank} ended {age_s:.0f} s ago and was not started again: {words.sentence}",
                )
            )

    def _modified(self) -> float | None:
        try:
            return self._path.stat().st_mtime
        except OSError:  # not there, or no directory yet
            return None

    def _words(self) -> Verdict:
        try:
            return Verdict(**json.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError) as error:
            return Verdict(1, f"node {self._rank} has ended, and {self._path} does not say why ({error})")
