"""How commands read the configuration: problems of fields together with all others."""

from collections.abc import Sequence
from pathlib import Path

from slime_like.checks.definition import NeedsOf
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError


def read_config(path: Path | None, flags: Sequence[str], needs_of: NeedsOf, run_dir: Path | None = None) -> RunConfig:
    """Read a configuration whose fields are valid.

    Args:
        needs_of: the checks that also run where a field is not.
        run_dir: the run directory where none is named.
    """
    try:
        return load_config(path, flags, run_dir)
    except ConfigError as error:
        from slime_like.checks.check import complete

        raise complete(error, needs_of) from error
