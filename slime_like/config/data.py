"""Where prompts come from."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from slime_like.config.base import Section


class DataConfig(Section):
    """Prompt files (JSONL or Parquet) and the keys inside their rows; a dotted key leads into nested objects."""

    train: tuple[Path, ...] = Field((), description="Training files, .jsonl or .parquet, read in this order.")
    prompt_key: str = Field("prompt", description="Row key of the prompt: a string, or a list of chat messages.")
    answer_key: str = Field("answer", description="Row key of the ground-truth answer.")
    response_key: str = Field("response", description="Row key of the demonstration (supervised mode only).")
    token_ids_key: str = Field(
        "input_token_ids", description="Row key of a pre-tokenised prompt; where present it wins over the text."
    )
    environment_key: str | None = Field(
        None, description="Row key of a mapping that rollout.environment is given; a row may lack it."
    )
    apply_chat_template: bool = Field(True, description="Render prompts with the tokenizer's chat template.")
    max_prompt_tokens: int = Field(1024, ge=1, description="Longer prompts are dropped and counted, never cut.")
    shuffle: bool = Field(True, description="Shuffle every epoch, by `seed` and epoch number.")


class EvaluationConfig(Section):
    """Held-out evaluation during training."""

    files: tuple[Path, ...] = Field(
        (), description="Held-out files, each also reported by itself; none: no evaluation."
    )
    every: int = Field(0, ge=0, description="Evaluate every so many steps; 0 means before and after training only.")
    max_prompts: int | None = Field(None, ge=1, description="Use only the first so many prompts.")
    temperature: float = Field(0.0, ge=0.0, description="0 is greedy.")
    samples_per_prompt: int = Field(1, ge=1, description="Responses per held-out prompt; several also give pass@k.")
    max_new_tokens: int | None = Field(None, ge=1, description="Length limit; none means `rollout.max_new_tokens`.")
