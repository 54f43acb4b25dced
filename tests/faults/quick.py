"""Flags of a run that is there to be broken."""

from pathlib import Path

from tests.conftest import Tiny


def quick(tiny: Tiny, run_dir: Path, *more: str) -> list[str]:
    """The transformers engine starts at once; no evaluation."""
    return tiny.rl_flags(run_dir, "--rollout.engine", "transformers", "--evaluation.files", "[]", *more)
