"""Training prompts and held-out evaluation."""

from pathlib import Path

from pydantic import Field

from slime_like.config.base import Section


class DataConfig(Section):
    """Prompt files (JSONL or Parquet) and the keys inside their rows; a dotted key leads into nested objects."""

    train: tuple[Path, ...] = Field((), description="Training files (.jsonl or .parquet), read in this order.")
    prompt_key: str = Field("prompt", description="Row key of the prompt: text or a list of chat messages.")
    answer_key: str = Field("answer", description="Row key of the ground-truth answer.")
    response_key: str = Field("response", description="Row key of the demonstration (supervised only).")
    token_ids_key: str = Field(
        "input_token_ids", description="Row key of a tokenized prompt; takes precedence over the text."
    )
    environment_key: str | None = Field(
        None, description="Row key of a mapping for rollout.environment; optional in a row."
    )
    apply_chat_template: bool = Field(True, description="Apply the tokenizer's chat template to prompts.")
    max_prompt_tokens: int = Field(1024, ge=1, description="Longer prompts are dropped and counted, never truncated.")
    shuffle: bool = Field(True, description="Shuffle every epoch, by `seed` and epoch.")


class EvaluationConfig(Section):
    """Held-out evaluation during training."""

    files: tuple[Path, ...] = Field((), description="Held-out files, also reported one by one; none: no evaluation.")
    every: int = Field(0, ge=0, description="Evaluation interval in steps; 0: before and after training only.")
    max_prompts: int | None = Field(None, ge=1, description="Use only the first prompts, up to this number.")
    temperature: float = Field(0.0, ge=0.0, description="0 is greedy.")
    samples_per_prompt: int = Field(1, ge=1, description="Responses per prompt; above 1 also gives pass@k.")
    max_new_tokens: int | None = Field(None, ge=1, description="Length limit; none: `rollout.max_new_tokens`.")
