"""Checks of settings that training on demonstrations does not read."""

from collections.abc import Iterator

from slime_like.config.run import RunConfig

_READ = {"prompts_per_step", "max_new_tokens", "num_engines", "stop_token_ids", "ignore_eos"}
"""Settings of ``rollout`` for its batches, for ``slime-like plan``, for ``auto``, and for ends of assistant turns."""
_ONLY_TRAINING = {"samples_per_prompt", "temperature", "top_p", "top_k", "min_p", "max_staleness", "stream"}
_ONLY_TRAINING |= {"oversample", "drop_zero_spread", "max_drops_per_step"}
"""Settings of ``rollout`` that ``slime-like eval`` does not read, either."""


def unread_problems(config: RunConfig) -> Iterator[str]:
    """Name settings of engines and rewards. With held-out files, ``slime-like eval`` may read them."""
    sections = {"rollout": config.rollout, "reward": config.reward, "sync": config.sync}
    for section, values in sections.items() if config.supervised else ():
        for name in values.all_changed:
            may_be_evaluated = config.evaluation.files and section != "sync" and name not in _ONLY_TRAINING
            if name not in _READ and not may_be_evaluated:
                yield f"{section}.{name} is set, but algorithm.loss=sft has neither engines nor rewards; remove it"
