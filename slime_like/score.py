"""Per-token logprobs and entropies of given sequences, computed by the trainer under any layout. No engine starts.

All ranks work on one window of rows. The next window is read after its output is written.
"""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
from torch import Tensor

from slime_like.config import RunConfig
from slime_like.data.token_rows import TokenRow, TokenRows
from slime_like.errors import DataError
from slime_like.interfaces import Scores
from slime_like.observability.names import SCORING_SPEED
from slime_like.observability.progress import Progress
from slime_like.orchestration.cluster.cluster import Cluster
from slime_like.orchestration.run.directory import run_directory
from slime_like.orchestration.trainer.batcher import window_tokens
from slime_like.orchestration.trainer.model_ranks import ModelRanks, policy_ranks
from slime_like.system.disk import whole_file
from slime_like.system.words import pluralize


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    """Totals of a run: ``mean_logprob`` over all response tokens, ``wall_s`` without the start of the ranks."""

    rows: int
    tokens: int
    mean_logprob: float
    wall_s: float


def score(config: RunConfig, source: Path, output: Path, weights: Path | None, temporary: bool) -> ScoreSummary:
    """Check every row, then score the rows in windows. Memory holds one window of packs, not the file.

    Args:
        source: token rows, see ``slime_like.data.token_rows``.
        output: file that gets ``{"id", "logprobs", "entropy"}`` per row, in input order; written whole or not at all.
        weights: ``trainer`` directory of a training checkpoint; ``None`` means the weights of ``model.path``.
        temporary: whether to create ``run_dir`` and remove it after success.

    Raises:
        SlimeLikeError: in one sentence; all processes have ended, and ``output`` is unchanged.
    """
    rows = TokenRows(source, config.model.path, config.trainer)
    num_rows = rows.count()
    if not num_rows:
        raise DataError("contains no rows", code="empty-input", who=str(source), remedy="add at least one")
    with ExitStack() as stack:
        run_dir = stack.enter_context(run_directory(config.run_dir, temporary))
        progress = stack.enter_context(Progress(config.logging.progress, num_rows, unit="sequence"))
        ranks = config.trainer.parallel.world_size
        progress.note(f"starting Ray and {pluralize(ranks, 'trainer rank')}; their logs: {run_dir / 'worker_logs'}")
        with progress.waiting("starting Ray"):
            stack.enter_context(Cluster(config.cluster, run_dir / "worker_logs", ranks, note=progress.note))
            policy = stack.enter_context(policy_ranks(config))
        with progress.waiting("trainer ranks", ranks) as waiting:
            policy.setup(waiting.on_waiting, only_scores=True, checkpoint=weights)
        out = stack.enter_context(whole_file(output))
        return _run(policy, rows, num_rows, out, progress)


def _run(policy: ModelRanks, rows: TokenRows, num_rows: int, out: TextIO, progress: Progress) -> ScoreSummary:
    started = time.monotonic()
    done = tokens = responses = 0
    total_logprob = 0.0
    for window in windows(rows, window_tokens(policy.config.trainer)):
        scores = policy.score([sequence for _, sequence in window])
        for (name, sequence), scored in zip(window, scores, strict=True):
            out.write(output_line(name, scored))
            total_logprob += float(scored["old_logprobs"].double().sum())
            responses += sequence.response_len
            tokens += sequence.total_len
        done += len(window)
        progress.update(done, {SCORING_SPEED: tokens / (time.monotonic() - started)})
    if done != num_rows:
        raise DataError(
            f"the input had {pluralize(num_rows, 'row')} when it was checked and {done} when it was scored",
            code="input-changed",
            remedy="do not change the file during the run",
        )
    return ScoreSummary(done, tokens, total_logprob / responses, time.monotonic() - started)


def windows(rows: Iterable[TokenRow], max_tokens: int) -> Iterator[list[TokenRow]]:
    """Yield consecutive rows with at most ``max_tokens`` tokens in total. A longer row comes by itself."""
    window: list[TokenRow] = []
    tokens = 0
    for row in rows:
        length = row[1].total_len
        if window and tokens + length > max_tokens:
            yield window
            window, tokens = [], 0
        window.append(row)
        tokens += length
    if window:
        yield window


def output_line(name: str | int, scored: Scores) -> str:
    """Format one row of the output. Each number is the shortest decimal that reads back as the same float32."""
    row = {"id": name, "logprobs": _shortest(scored["old_logprobs"]), "entropy": _shortest(scored["entropy"])}
    return json.dumps(row, allow_nan=False) + "\n"


def _shortest(values: Tensor) -> list[float]:
    return [float(text) for text in values.numpy().astype(np.float32).astype("U").tolist()]
