"""Conversion and comparison of checkpoints with a progress bar. Starts neither Ray nor ranks nor engines."""

import contextlib
import logging
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from slime_like.config import RunConfig
from slime_like.conversion.compare import Difference, compare_sources
from slime_like.errors import ConfigError
from slime_like.interfaces import backend_of
from slime_like.interfaces.conversion import ConversionOptions, ConversionSummary, Converter, Report, TensorSource
from slime_like.observability.names import CONVERSION_SPEED
from slime_like.observability.progress import Progress

_UNIT = 2**20


def converter_of(config: RunConfig) -> Converter:
    """Return the converter of ``config.trainer.backend``.

    Raises:
        ConfigError: the backend has no converter.
    """
    # Megatron warns about every package that would make training faster, but nothing is trained here.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.")
    backend = backend_of(config)
    if not hasattr(backend, "converter"):
        raise ConfigError(f"trainer.backend={config.trainer.backend} does not convert checkpoints; use megatron")
    converter: Converter = backend.converter()
    return converter


def to_megatron(config: RunConfig, output: Path, options: ConversionOptions) -> ConversionSummary:
    """Convert ``config.model.path`` to a checkpoint with the layout ``config.trainer.parallel``."""
    with _reported(config, "MiB converted") as report:
        return converter_of(config).to_checkpoint(config, output, options, report)


def to_hugging_face(config: RunConfig, checkpoint: Path, output: Path, options: ConversionOptions) -> ConversionSummary:
    """Convert a checkpoint's ``trainer`` directory to a Hugging Face directory."""
    with _reported(config, "MiB converted") as report:
        return converter_of(config).to_hugging_face(config, checkpoint, output, options, report)


def compare(config: RunConfig, a: TensorSource, b: TensorSource, workers: int) -> list[Difference]:
    """List the differences between two opened checkpoints."""
    with _reported(config, "MiB compared") as report:
        return compare_sources(a, b, workers, report)


@contextlib.contextmanager
def _reported(config: RunConfig, unit: str) -> Iterator[Report]:
    """Show a progress bar, which begins with the first report, because that has the total."""
    with contextlib.ExitStack() as stack:
        bar: Progress | None = None
        before = shown = -1
        started = time.monotonic()

        def report(done: int, total: int) -> None:
            """Show bytes as whole units, each once. The speed does not count what an earlier start has done."""
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
