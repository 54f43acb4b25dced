"""Thresholds of the rules that watch a run, and what follows when one is crossed."""

import os
from collections.abc import Iterator

from pydantic import Field

from slime_like.config.base import Section

MOST_STEPS = 1000
"""Largest threshold in steps."""


class HealthConfig(Section):
    """Thresholds of the [rules that raise alarms](troubleshooting.md#alarms). none switches a rule off."""

    webhook: str | None = None
    """URL that gets every [alarm](troubleshooting.md#alarms) as a JSON POST. $NAME is an environment variable, whose
    value is not saved."""
    stop_on: tuple[str, ...] = ()
    """Rules that end the run when they are raised, after a checkpoint (`health-stop`, exit code 1)."""
    slow_phase: float | None = Field(10.0, gt=1, description="Time of a phase, as a multiple of its median.")
    idle_trainers: float | None = Field(95.0, gt=0, le=100)
    """Percent of a step in which trainers wait for samples, with `rollout.max_staleness` above 0."""
    idle_engines: float | None = Field(95.0, gt=0, le=100)
    """Percent of a step in which engines have nothing to sample, with `rollout.max_staleness` above 0."""
    failed_samples: float | None = Field(0.1, gt=0, le=1, description="Fraction of responses that failed or aborted.")
    engine_gap: float | None = Field(2.0, gt=1, description="Factor between the perplexities of trainer and engine.")
    entropy_cliff: float | None = Field(4.0, gt=1, description="Factor between the entropy and its median.")
    length_cliff: float | None = Field(3.0, gt=1, description="Factor between the mean length and its median.")
    truncated: float | None = Field(0.5, gt=0, le=1, description="Fraction of responses at a token limit.")
    no_gradient: int | None = Field(5, ge=1, le=MOST_STEPS, description="Steps in a row in which every advantage is 0.")
    reward_flat: int | None = Field(300, ge=1, le=MOST_STEPS, description="Steps since the mean reward was highest.")
    repeated_text: float | None = Field(0.1, gt=0, le=1, description="Fraction of responses that end in a loop.")
    explained_variance: int | None = Field(50, ge=1, le=MOST_STEPS)
    """Steps in a row in which the critic's explained variance is negative."""
    disk: float | None = Field(0.5, gt=0, description="Size of a checkpoint over the free space for run_dir.")

    def conflicts(self) -> Iterator[str]:
        if self.webhook is not None and not os.path.expandvars(self.webhook).startswith(("http://", "https://")):
            yield "webhook is neither an http nor an https URL; give one, or $NAME of an environment variable with one"
        rules = [name for name, limit in self if limit is not None and name not in ("webhook", "stop_on")]
        if unknown := sorted({*self.stop_on} - {*rules}):
            yield f"stop_on={unknown[0]} is not a rule, or is switched off; use {', '.join(rules)}"
