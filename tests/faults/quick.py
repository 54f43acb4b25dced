"""Flags of a run for fault tests."""

from pathlib import Path

from tests.conftest import Tiny


def quick(tiny: Tiny, run_dir: Path, *more: str) -> list[str]:
    """Return flags with the transformers engine, which starts fastest, and without evaluation."""
    return tiny.rl_flags(run_dir, "--rollout.engine", "transformers", "--evaluation.files", "[]", *more)
