"""Conversion and comparison of checkpoints with a progress bar. Starts neither Ray nor ranks nor engines."""

import contextlib
import logging
import time
import warnings
from collections.abc import Iterator

from slime_like.config import LoggingConfig, ModelConfig, TrainerConfig
from slime_like.errors import ConfigError
from slime_like.interfaces import load_backend
from slime_like.interfaces.conversion import Converter, Report
from slime_like.observability.names import CONVERSION_SPEED
from slime_like.observability.progress import Progress

_UNIT = 2**20


def converter_of(model: ModelConfig, trainer: TrainerConfig) -> Converter:
    """Return the converter of ``trainer.backend``. Raises ``ConfigError`` if the backend has no converter."""
    # Megatron warns about every package that would make training faster, but nothing is trained here.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.")
    backend = load_backend(trainer.backend)
    if not hasattr(backend, "converter"):
        raise ConfigError(f"trainer.backend={trainer.backend} does not convert checkpoints; use megatron")
    converter: Converter = backend.converter(model, trainer)
    return converter


@contextlib.contextmanager
def reported(logging: LoggingConfig, unit: str) -> Iterator[Report]:
    """Show a progress bar, which begins with the first report, because that has the total."""
    with contextlib.ExitStack() as stack:
        bar: Progress | None = None
        before, started = 0, 0.0

        def report(done: int, total: int) -> None:
            """Show bytes as whole units. The speed does not count what an earlier start has done."""
            nonlocal bar, before, started
            units = max(1, total // _UNIT)
            if bar is None:
                bar = stack.enter_context(Progress(logging.progress, units, unit=unit))
                before, started = done, time.monotonic()
            speed = (done - before) / 1e9 / max(time.monotonic() - started, 1e-9)
            bar.update(units if done == total else done // _UNIT, {CONVERSION_SPEED: speed})

        yield report
