"""What both systems do, and where it lies on disk."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

NUM_PROMPTS = 32
SAMPLES_PER_PROMPT = 8

# An untrained model never answers a sum, so that math-verify would give every sample the same reward and the update
# nothing to do but zeros. Responses differ in length.
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
        warmup_steps: the first steps, which are not timed.
        learning_rate: constant; so small that the lengths of responses do not drift while they are timed.
        prompts_per_step, samples_per_prompt: their product is the number of sequences of a step.
        seed: of sampling.
        engine: our inference engine.
        processes: our engines, and our data-parallel trainer ranks; they work in turns. The other system has threads.
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
        """Sequences of one step."""
        return self.prompts_per_step * self.samples_per_prompt

    def write(self, path: Path) -> None:
        """As JSON, for the process of the other system."""
        path.write_text(json.dumps(asdict(self), default=str), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Workload:
        """What ``write`` wrote."""
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
