"""Comparison of every parallel layout that fits the machine with one rank, on the same batch."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

import ray
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime_like.checks.layout import layout_problems
from slime_like.checks.packages import attention_problems
from slime_like.config import RunConfig
from slime_like.errors import ConfigError, TrainerError
from slime_like.models.dimensions import ModelDimensions
from slime_like.observability.progress import Progress
from slime_like.orchestration.cluster.cluster import Cluster
from slime_like.orchestration.run.directory import run_directory
from slime_like.orchestration.trainer.model_ranks import policy_ranks, present
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.system.console import Console
from slime_like.system.words import pluralize
from slime_like.trajectory import ScoredTrajectory
from slime_like.verification.comparison import (
    Measurement,
    Parity,
    TensorGap,
    add_frozen_logprobs,
    add_gaps,
    compare_gradient,
    compare_measurements,
    compare_tensor,
    misplaced_tensor,
)
from slime_like.verification.layouts import Layout, tolerances_of

CPU_RANKS = 8
"""Maximum number of ranks of a layout on a machine without GPUs."""

_Sink = Callable[[Mapping[str, Tensor]], None]
_WIDTH = 120
_FIGURES = (
    ("logprobs (max)", "logprob_max"),
    ("(mean)", "logprob_mean"),
    ("loss", "loss"),
    ("grad norm", "grad_norm"),
    ("gradients", "gradients"),
    ("weights", "weights"),
)


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """Line of one layout: its deviation, the reason why it does not fit the model or machine, or its failure."""

    layout: str
    ranks: int
    parity: Parity | None = None
    skipped: str | None = None
    failed: str | None = None

    @property
    def verdict(self) -> str:
        if self.parity is None:
            return "FAILED" if self.skipped is None else "skipped"
        return "DIFFERS" if self.parity.differences else "same"

    @property
    def sentences(self) -> list[str]:
        return [*filter(None, (self.skipped, self.failed)), *(self.parity.differences if self.parity else ())]


def verify_layouts(
    config: RunConfig,
    baseline: Layout,
    layouts: Sequence[Layout],
    batch: Sequence[ScoredTrajectory],
    *,
    required: bool,
    temporary: bool,
) -> Iterator[LayoutResult]:
    """Compare per-token logprobs, gradients, ``config.steps`` optimizer steps, and weights after them.

    Args:
        required: treat a layout that does not fit as an error, not as a skipped row.
        temporary: create ``config.run_dir``, and remove it after success.

    Yields:
        One row per layout, the baseline first, as soon as it is known.

    Raises:
        SlimeLikeError: the baseline failed, or a required layout does not fit. Every process has ended by then.
    """
    dimensions, everyone = ModelDimensions.from_checkpoint(config.model.path), (baseline, *layouts)
    reasons = {
        layout.name: model_misfit(layout, dimensions, len(batch)) or setting_misfit(layout.apply_to(config))
        for layout in everyone
    }
    must_fit = everyone if required else everyone[:1]
    _refuse(must_fit, reasons)
    with ExitStack() as stack:
        run_dir = stack.enter_context(run_directory(config.run_dir, temporary))
        progress = stack.enter_context(Progress(config.logging.progress, 1 + len(layouts), unit="layout"))
        progress.note(f"starting Ray; the ranks' logs: {run_dir / 'worker_logs'}")
        stack.enter_context(Cluster(config.cluster, run_dir / "worker_logs", CPU_RANKS, note=progress.note))
        resources = ray.cluster_resources()
        reasons |= {layout.name: reasons[layout.name] or device_misfit(layout, resources) for layout in everyone}
        _refuse(must_fit, reasons)
        progress.note(f"{baseline.name}: the baseline of the other layouts")
        weights = stack.enter_context(TemporaryDirectory(prefix="weights-", dir=run_dir))
        measured = Baseline(config, baseline, batch, Path(weights))
        yield LayoutResult(baseline.name, baseline.parallel.world_size, measured.parity)
        progress.update(1, {})
        for done, layout in enumerate(layouts, start=2):
            progress.note(f"{layout.name}: {pluralize(layout.parallel.world_size, 'rank')}")
            yield measured.row(layout, reasons[layout.name])
            progress.update(done, {})


def model_misfit(layout: Layout, dimensions: ModelDimensions, sequences: int) -> str | None:
    """Return why a layout cannot run this model and a batch of ``sequences`` sequences, or ``None``."""
    problems = layout_problems(layout.parallel, dimensions)
    if layout.parallel.data > sequences:
        text = f"has {layout.parallel.data} replicas, and the batch has {sequences} sequences; every replica needs one"
        problems = [*problems, text]
    return problems[0] if problems else None


def setting_misfit(config: RunConfig) -> str | None:
    """Return why a layout's attention is unavailable here or conflicts with another setting, or ``None``."""
    return next(iter([*attention_problems(config.trainer, config.model), *config.all_conflicts()]), None)


def device_misfit(layout: Layout, resources: Mapping[str, float]) -> str | None:
    """Return why a layout cannot run on a cluster with these resources (named as by Ray), or ``None``."""
    ranks, gpus = layout.parallel.world_size, int(resources.get("GPU", 0))
    there = gpus or min(CPU_RANKS, int(resources.get("CPU", 0)))
    if ranks <= there:
        return None
    return f"needs {pluralize(ranks, 'rank')}; available: {pluralize(there, 'GPU' if gpus else 'CPU slot')}"


def _refuse(must_fit: Sequence[Layout], reasons: Mapping[str, str | None]) -> None:
    problems = [f"layout {layout.name}: {reasons[layout.name]}" for layout in must_fit if reasons[layout.name]]
    if problems:
        raise ConfigError(problems)


class TensorStore:
    """Tensors by name on disk, each in its own file."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self.names: set[str] = set()

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            save_file({name: tensor.contiguous()}, self._directory / name)
        self.names |= set(tensors)

    def __getitem__(self, name: str) -> Tensor:
        return load_file(self._directory / name)[name]

    def gaps(self, found: Mapping[str, Tensor], compare: Callable[[str, Tensor, Tensor], TensorGap]) -> list[TensorGap]:
        """Compare each found tensor with the stored one: ``compare(name, found, stored)``."""
        return [
            compare(name, tensor, self[name]) if name in self.names else misplaced_tensor(name, "should not exist")
            for name, tensor in found.items()
        ]

    def with_missing(self, gaps: Sequence[TensorGap]) -> list[TensorGap]:
        """Return ``gaps``, and one for each stored tensor that none of them is about."""
        return [*gaps, *(misplaced_tensor(name, "is missing") for name in self.names - {gap.name for gap in gaps})]


class Baseline:
    """Results of the baseline. Its gradients, and its weights before and after training, are on disk.

    Attributes:
        batch: the batch of every layout, which contains the frozen logprobs.
        parity: deviation from itself; not zero if a result is not a number.
    """

    def __init__(self, config: RunConfig, layout: Layout, batch: Sequence[ScoredTrajectory], directory: Path) -> None:
        self._config = config
        self._tolerances = tolerances_of(config.model.dtype, ModelDimensions.from_checkpoint(config.model.path))
        self._gradients = TensorStore(directory / "gradients")
        self._initial, self._final = TensorStore(directory / "before"), TensorStore(directory / "after")
        self.batch = batch
        self._measured = self._measure(layout, self._gradients.add, self._final.add, self._initial.add)
        self.parity = compare_measurements(self._measured, self._measured, self.batch, self._tolerances)

    def row(self, layout: Layout, misfit: str | None) -> LayoutResult:
        """Return the line of another layout, which runs unless it has a ``misfit``."""
        ranks = layout.parallel.world_size
        if misfit is not None:
            return LayoutResult(layout.name, ranks, skipped=misfit)
        try:
            return LayoutResult(layout.name, ranks, self._compare(layout))
        except TrainerError as error:
            return LayoutResult(layout.name, ranks, failed=str(error))

    def _compare(self, layout: Layout) -> Parity:
        """Run another layout. Its tensors are compared bucket by bucket and not kept."""
        gradients: list[TensorGap] = []
        weights: list[TensorGap] = []

        def gradient(name: str, found: Tensor, expected: Tensor) -> TensorGap:
            return compare_gradient(name, found, expected, self._measured.grad_norm[0], self._tolerances)

        def weight(name: str, found: Tensor, expected: Tensor) -> TensorGap:
            return compare_tensor(name, found, expected, self._initial[name], self._tolerances)

        found = self._measure(
            layout,
            lambda tensors: gradients.extend(self._gradients.gaps(tensors, gradient)),
            lambda tensors: weights.extend(self._final.gaps(tensors, weight)),
        )
        parity = compare_measurements(found, self._measured, self.batch, self._tolerances)
        add_gaps(parity, "gradients", self._gradients.with_missing(gradients))
        add_gaps(parity, "weights", self._final.with_missing(weights))
        return parity

    def _measure(self, layout: Layout, gradients: _Sink, after: _Sink, before: _Sink | None = None) -> Measurement:
        """Score and train the batch; the sinks receive the first gradients, and the weights after and before training.

        The first scores become the batch's frozen logprobs.
        """
        config = layout.apply_to(self._config)
        with policy_ranks(config) as policy:
            policy.setup()
            if before is not None:
                _drain(policy.export(), before)
            scores = policy.score(self.batch)
            self.batch = add_frozen_logprobs(self.batch, scores, config.seed)
            packed = policy.load_batch(self.batch)
            _drain(policy.export(TrainerRank.begin_gradient_export, 0, packed.denominators[0]), gradients)
            stats = [
                present(policy.call("training", TrainerRank.train_minibatch, index, denominator))[0]
                for _ in range(config.steps)
                for index, denominator in enumerate(packed.denominators)
            ]
            _drain(policy.export(), after)
        logprobs = [score["old_logprobs"] for score in scores]
        return Measurement(logprobs, [float(s.loss) for s in stats], [float(s.grad_norm) for s in stats])


def _drain(buckets: Iterable[Mapping[str, Tensor]], sink: _Sink) -> None:
    for tensors in buckets:
        sink(tensors)


def print_table(title: str, rows: Sequence[LayoutResult], stream: TextIO | None = None) -> None:
    """Print the table, then a line for every difference, failure and skipped layout."""
    stream = stream or sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else _WIDTH, highlight=False, soft_wrap=False)
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("layout", no_wrap=True)
    table.add_column("ranks", justify="right", no_wrap=True)
    for heading, _ in _FIGURES:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in rows:
        figures = ["" if row.parity is None else f"{getattr(row.parity, name):.1e}" for _, name in _FIGURES]
        table.add_row(row.layout, str(row.ranks), *figures, row.verdict)
    console.print(table)
    for row in rows:
        for sentence in row.sentences:
            stream.write(f"{row.layout}: {sentence}\n")
    stream.flush()
