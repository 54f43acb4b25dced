"""Checkpoints converted and compared, with a progress bar. Nothing is started: no Ray, no rank, no engine."""

import contextlib
import logging
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from slime_like.config import RunConfig
from slime_like.conversion.compare import Difference, compare_sources
from slime_like.errors import ConfigError
from slime_like.interfaces import load_backend
from slime_like.interfaces.conversion import ConversionOptions, ConversionSummary, Converter, Report, TensorSource
from slime_like.observability.names import CONVERSION_SPEED
from slime_like.observability.progress import Progress

_UNIT = 2**20


def converter_of(config: RunConfig) -> Converter:
    """Return the converter of ``config.trainer.backend``.

    Raises:
        ConfigError: that backend's checkpoints are not converted.
    """
    with _without_remarks():
        backend = load_backend(config.trainer.backend)
        if not hasattr(backend, "converter"):
            raise ConfigError(f"trainer.backend={config.trainer.backend} converts no checkpoints; use megatron")
        converter: Converter = backend.converter()
        return converter


def to_megatron(config: RunConfig, output: Path, options: ConversionOptions) -> ConversionSummary:
    """``config.model.path`` to a checkpoint laid out as ``config.trainer.parallel``."""
    with _reported(config, "MiB converted") as report:
        return converter_of(config).to_checkpoint(config, output, options, report)


def to_hugging_face(config: RunConfig, checkpoint: Path, output: Path, options: ConversionOptions) -> ConversionSummary:
    """A checkpoint's ``trainer`` directory to a Hugging Face directory."""
    with _reported(config, "MiB converted") as report:
        return converter_of(config).to_hugging_face(config, checkpoint, output, options, report)


def open_checkpoint(config: RunConfig, checkpoint: Path) -> TensorSource:
    """A checkpoint's ``trainer`` directory, to be compared."""
    with _without_remarks():
        return converter_of(config).open_checkpoint(config, checkpoint)


def open_hugging_face(config: RunConfig, directory: Path) -> TensorSource:
    """A Hugging Face directory of any family, to be compared."""
    return converter_of(config).open_hugging_face(directory)


def compare(config: RunConfig, a: TensorSource, b: TensorSource, workers: int) -> list[Difference]:
    """List the differences between two opened checkpoints."""
    with _reported(config, "MiB compared") as report:
        return compare_sources(a, b, workers, report)


@contextlib.contextmanager
def _reported(config: RunConfig, unit: str) -> Iterator[Report]:
    """A progress bar that begins with the first report, which has the total."""
    with contextlib.ExitStack() as stack, _without_remarks():
        bar: Progress | None = None
        before = shown = -1
        started = time.monotonic()

        def report(done: int, total: int) -> None:
            """Show bytes as whole units, each once; the speed does not count what an earlier start has done."""
            nonlocal bar, before, shown, started
            units = max(1, total // _UNIT)
            if bar is None:
                bar = stack.enter_context(Progress(config.logging.progress, units, unit=unit))
                before, started = done, time.monotonic()
            whole = units if done == total else done // _UNIT
            if whole != shown:
                shown, seconds = whole, time.monotonic() - started
                bar.update(whole, {CONVERSION_SPEED: (done - before) / 1e9 / seconds if seconds > 0 else 0.0})

        yield report


@contextlib.contextmanager
def _without_remarks() -> Iterator[None]:
    """Megatron remarks on every package that would make training faster; nothing is trained here."""
    logger = logging.getLogger("megatron")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        try:
            yield
        finally:
            logger.setLevel(level)
