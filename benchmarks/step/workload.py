"""The workload of both systems and its files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

NUM_PROMPTS = 32
SAMPLES_PER_PROMPT = 8

# An untrained model never answers a sum, so math-verify would give all samples the same reward, and updates would
# compute only zeros. Responses differ in length.
REWARD = "length"
REWARD_OPTIONS = {"limit": 0, "buffer": 1024}


@dataclass(frozen=True, slots=True)
class Workload:
    """One setting of the comparison.

    Attributes:
        model: Hugging Face checkpoint.
        prompts: JSONL file with ``prompt`` and ``answer``, read in its order.
        max_new_tokens: length limit of a response.
        steps: training steps, one optimizer update each.
        warmup_steps: number of first steps that are not timed.
        learning_rate: constant, and so small that response lengths do not drift.
        prompts_per_step, samples_per_prompt: their product is the number of sequences per step.
        seed: for sampling.
        engine: our inference engine.
        processes: our engines and, in turn, our data-parallel trainer ranks. The other system uses threads.
        device: cuda (bfloat16, with main weights in float32) or cpu (float32).
    """

    model: Path
    prompts: Path
    max_new_tokens: int
    steps: int
    warmup_steps: int
    learning_rate: float = 1e-6
    prompts_per_step: int = NUM_PROMPTS
    samples_per_prompt: int = SAMPLES_PER_PROMPT
    seed: int = 0
    engine: str = "transformers"
    processes: int = 1
    device: str = "cpu"

    @property
    def sequences(self) -> int:
        """Number of sequences per step."""
        return self.prompts_per_step * self.samples_per_prompt

    def write(self, path: Path) -> None:
        """Write the workload as JSON for the other system's process."""
        path.write_text(json.dumps(asdict(self), default=str), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Workload:
        """Read a file that ``write`` wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**fields, "model": Path(fields["model"]), "prompts": Path(fields["prompts"])})


def make_inputs(directory: Path, shape: str) -> tuple[Path, Path]:
    """Make an untrained model, which rarely ends a response by itself, and sums as prompts.

    Returns:
        (model, prompts).
    """
    from benchmarks.trainer.shapes import write_checkpoint
    from slime_like.examples.tiny_model import make_arithmetic_data

    write_checkpoint(shape, directory, "float32")
    make_arithmetic_data(directory / "data")
    return directory, directory / "data" / "train.jsonl"
