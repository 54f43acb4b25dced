"""Measure TRL's side in a separate process: ``python -m benchmarks.step.trl_side FILE OUT``."""

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.report import run_to_its_end
from benchmarks.step.workload import REWARD, REWARD_OPTIONS, Measurement, Workload
from slime_like.sandbox.rewards.registry import resolve_reward

_REWARD = resolve_reward(REWARD)


def measure(workload: Workload, directory: Path) -> Measurement:
    """Train in a separate process, in ``directory``."""
    given, records = directory / "workload.json", directory / "trl.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    workload.write(given)
    command = [sys.executable, "-m", "benchmarks.step.trl_side", str(given), str(records)]
    run_to_its_end(command, directory / "trl.log")
    steps = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()][workload.warmup_steps :]
    return Measurement(median(s["step_s"] for s in steps), fmean(s["response_length"] for s in steps))


def reward(prompts: list[str], completions: list[str], answer: list[str], **unused: Any) -> list[float]:
    """Call our reward workers' function in the trainer's own process."""
    return [
        _REWARD(prompt, completion, truth, **REWARD_OPTIONS).reward
        for prompt, completion, truth in zip(prompts, completions, answer, strict=True)
    ]


def _settings(workload: Workload, scratch: str) -> Any:
    """Return TRL's settings for the workload."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=scratch,
        use_cpu=workload.device == "cpu",
        max_steps=workload.steps,
        seed=workload.seed,
        # One batch is the whole step: generated at once, with one update without accumulation.
        per_device_train_batch_size=workload.prompts_per_step * workload.samples_per_prompt,
        gradient_accumulation_steps=1,
        num_generations=workload.samples_per_prompt,
        max_completion_length=workload.max_new_tokens,
        shuffle_dataset=False,
        temperature=1.0,
        beta=0.0,
        learning_rate=workload.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        # TRL's defaults save memory at the expense of time and use bfloat16 even on CPUs; we compare neither.
        bf16=workload.device == "cuda",
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def train(workload: Workload, records: Path) -> None:
    """Run the trainer and write a line per step: seconds between the ends of steps, and TRL's mean length."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    class StepClock(TrainerCallback):
        """Measures seconds from the end of one step, including logging, to the end of the next."""

        def __init__(self) -> None:
            self.seconds: list[float] = []
            self._last = 0.0

        def on_train_begin(self, *arguments: Any, **options: Any) -> None:
            self._last = time.perf_counter()

        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            now = time.perf_counter()
            self.seconds.append(now - self._last)
            self._last = now

    rows = [json.loads(line) for line in workload.prompts.read_text(encoding="utf-8").splitlines()]
    dataset = Dataset.from_list([{"prompt": row["prompt"], "answer": row["answer"]} for row in rows])
    clock = StepClock()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=str(workload.model),
            args=_settings(workload, scratch),
            reward_funcs=reward,
            train_dataset=dataset,
            processing_class=AutoTokenizer.from_pretrained(workload.model),
            callbacks=[clock],
        )
        trainer.train()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "loss" in entry]
    lines = [
        json.dumps({"step_s": seconds, "response_length": length})
        for seconds, length in zip(clock.seconds, lengths, strict=True)
    ]
    records.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    train(Workload.read(Path(sys.argv[1])), Path(sys.argv[2]))
