"""Held-out accuracy by the same engines and reward workers that training uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime_like.config import RunConfig
from slime_like.data.prompts import PromptSource
from slime_like.orchestration.rollout_manager import RolloutManager
from slime_like.orchestration.rollouts import build_requests, evaluation_sampling, to_group
from slime_like.orchestration.scoring import Scorer


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Mean over responses of the first reward function's success, and how long responses were."""

    accuracy: float
    num_responses: int
    response_length_mean: float
    truncated_fraction: float


class Evaluator:
    """Evaluates on one fixed list of held-out prompts."""

    def __init__(self, config: RunConfig, engines: RolloutManager, scorer: Scorer, tokenizer: Any) -> None:
        self._config = config
        self._engines = engines
        self._scorer = scorer
        self._sampling = evaluation_sampling(config)
        data = config.data.model_copy(update={"shuffle": False})
        source = PromptSource(config.evaluation.files, tokenizer, data, seed=0)
        count = min(source.num_rows, config.evaluation.max_prompts or source.num_rows)
        self._prompts = source.next(count)

    def run(self, step: int) -> EvaluationResult:
        samples = self._config.evaluation.samples_per_prompt
        requests = build_requests(self._prompts, self._sampling, samples, self._config.seed, f"evaluation-{step}")
        answers = self._engines.generate(requests)
        trajectories = [
            trajectory
            for prompt, answer in zip(self._prompts, answers, strict=True)
            for trajectory in to_group(prompt, answer, self._sampling.temperature or 1.0).trajectories
        ]
        outcomes = self._scorer.outcomes(trajectories)
        count = len(trajectories)
        return EvaluationResult(
            accuracy=sum(outcome.successes[0] for outcome in outcomes) / count,
            num_responses=count,
            response_length_mean=sum(t.response_len for t in trajectories) / count,
            truncated_fraction=sum(t.finish_reason == "length" for t in trajectories) / count,
        )
