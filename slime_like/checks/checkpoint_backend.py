"""Which trainer backend wrote a checkpoint: only it reads the files again. Needs neither torch nor Ray."""

import json
from pathlib import Path

from slime_like.models.converted import DESCRIPTION

BACKEND = "backend"
"""In a checkpoint's ``state.json``: whose files it holds."""


def backend_problem(checkpoint: Path, backend: str, field: str) -> str | None:
    """That ``backend`` cannot read the checkpoint, in one sentence with its remedy; ``None`` where it can.

    A checkpoint that does not say who wrote it is believed: reading it tells the rest.

    Args:
        checkpoint: a run's checkpoints/step-N, or what ``slime-like convert to-megatron`` wrote.
        backend: ``trainer.backend``.
        field: what names the checkpoint, for the sentence.
    """
    wrote = _written_by(checkpoint)
    if wrote is None or wrote == backend:
        return None
    return (
        f"{field}={checkpoint} was written by {wrote}, whose files only it reads, and trainer.backend={backend}; set "
        f"trainer.backend={wrote}, or use its Hugging Face export (`slime-like convert to-hf`)"
    )


def _written_by(checkpoint: Path) -> str | None:
    if (checkpoint / DESCRIPTION).is_file():
        return "megatron"
    try:
        state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    wrote = state.get(BACKEND) if isinstance(state, dict) else None
    return wrote if isinstance(wrote, str) else None
