"""Held-out accuracy, measured with the engines and reward workers of training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime_like.agents.responses import require_calls
from slime_like.config import RunConfig
from slime_like.data.prompts import Prompt, PromptSource
from slime_like.data.rows import held_out_settings
from slime_like.observability.progress import Progress
from slime_like.observability.tables import HeldOutSample
from slime_like.orchestration.rollout.engines import Engines
from slime_like.orchestration.rollout.requests import build_requests, evaluation_sampling, to_group, turn_form
from slime_like.orchestration.rollout.rows import Rollout, rollouts_of
from slime_like.orchestration.rollout.scoring import Scorer, failure_text
from slime_like.sandbox.rewards.pool import RewardOutcome
from slime_like.sandbox.rewards.registry import required_of_rows
from slime_like.statistics import mean_pass_at_k, powers_up_to
from slime_like.system.words import pluralize
from slime_like.trajectory import UnscoredTrajectory


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Metrics over all files, and per file if there are several.

    Attributes:
        overall, datasets: ``accuracy`` is the mean over scored responses of the first reward function's success, NaN if
            none was scored. ``scoring_failures`` count neither as solved nor as unsolved. ``pass@k`` is over prompts
            with k scored samples, if there are several per prompt.
        samples: first responses to the first prompts, as many as a debug table has; or all responses.
    """

    overall: dict[str, float]
    datasets: dict[str, dict[str, float]]
    samples: list[HeldOutSample]


class Evaluator:
    """Evaluator on fixed lists of held-out prompts, one per file, from ``held_out``."""

    def __init__(
        self, config: RunConfig, engines: Engines, scorer: Scorer, datasets: Mapping[str, Sequence[Prompt]]
    ) -> None:
        self._config = config
        self._engines = engines
        self._scorer = scorer
        self._sampling = evaluation_sampling(config.evaluation, config.rollout, config.model)
        self._datasets = datasets

    def run(self, step: int, progress: Progress, keep_all: bool = False) -> EvaluationResult:
        """Sample and score every prompt with the weights that the engines serve. ``keep_all`` keeps all samples."""
        prompts = [prompt for dataset in self._datasets.values() for prompt in dataset]
        requests = build_requests(
            prompts, self._sampling, self._config.evaluation.samples_per_prompt, self._config.seed, f"evaluation-{step}"
        )
        temperature = self._sampling.temperature or 1.0
        with progress.waiting("evaluating", len(prompts), "prompt") as waiting:
            answers = self._engines.generate_all(requests, waiting.reach)
            groups = [to_group(prompt, answer, temperature) for prompt, answer in zip(prompts, answers, strict=True)]
            outcomes = self._scorer.outcomes(groups)
        if failures := [outcome.metadata for outcome in outcomes if outcome.failed]:
            what = f"scoring failed for {len(failures)} of {pluralize(len(outcomes), 'response')}"
            progress.note(f"evaluation: {what} ({failure_text(failures)}); they are neither right nor wrong")
        remaining = iter(outcomes)
        samples = [[(rollout, next(remaining)) for rollout in rollouts_of(group.trajectories)] for group in groups]
        names = [name for name, dataset in self._datasets.items() for _ in dataset]
        named = list(zip(names, samples, strict=True))
        results = {file: _figures([each for name, each in named if name == file]) for file in self._datasets}
        kept = named if keep_all else [(name, each[:1]) for name, each in named[: self._config.debug.samples_per_step]]
        shown = [_shown(name, sample) for name, each in kept for sample in each]
        return EvaluationResult(_figures(samples), results if len(results) > 1 else {}, shown)


def _shown(dataset: str, sample: tuple[Rollout[UnscoredTrajectory], RewardOutcome]) -> HeldOutSample:
    rollout, outcome = sample
    last = rollout.last
    return HeldOutSample(
        dataset,
        rollout.group_id,
        last.prompt_tokens.tolist(),
        last.response_tokens.tolist(),
        last.answer,
        None if outcome.failed else outcome.successes[0] > 0,
        rollout.finish_reason,
    )


def dataset_names(files: Sequence[Path]) -> list[str]:
    """Return the files' names without endings, with as many parent directories as make them unique."""
    for parts in range(1, max((len(file.parts) for file in files), default=1) + 1):
        names = ["/".join(file.with_suffix("").parts[-parts:]) for file in files]
        if len(set(names)) == len(names):
            return names
    return [f"{file.stem}-{index}" for index, file in enumerate(files)]


def held_out(config: RunConfig, tokenizer: Any) -> dict[str, list[Prompt]]:
    """Read each file's prompts in order. Group ids are unique across files.

    Raises:
        DataError: a file has no usable row or a bad one (``file:line: reason``).
        ConfigError: calls in the form of the chat template cannot be read.
    """
    datasets: dict[str, list[Prompt]] = {}
    count, agent = 0, config.rollout.agent
    for name, file in zip(dataset_names(config.evaluation.files), config.evaluation.files, strict=True):
        data = held_out_settings(config.data, file).model_copy(update={"shuffle": False})
        source = PromptSource([file], tokenizer, data, seed=0, **required_of_rows(config.reward, agent.is_set))
        require_calls(turn_form(data, agent, tokenizer), agent, config.model.path, source.has_tools)
        wanted = min(source.num_rows, config.evaluation.max_prompts or source.num_rows)
        datasets[name] = [replace(prompt, group_id=count + prompt.group_id) for prompt in source.next(wanted)]
        count += wanted
    return datasets


def _figures(prompts: Sequence[Sequence[tuple[Rollout[UnscoredTrajectory], RewardOutcome]]]) -> dict[str, float]:
    successes = [[outcome.successes[0] > 0 for _, outcome in each if not outcome.failed] for each in prompts]
    scored = sum(map(len, successes))
    passes = {k: [one for one in successes if len(one) >= k] for k in powers_up_to(len(prompts[0]))}
    responses = [rollout for samples in prompts for rollout, _ in samples]
    return {
        **{f"pass@{k}": mean_pass_at_k(each, k) for k, each in passes.items() if each},
        "accuracy": sum(map(sum, successes)) / scored if scored else math.nan,
        "num_responses": float(len(responses)),
        "response_length_mean": sum(response.sampled_len for response in responses) / len(responses),
        "truncated_fraction": sum(response.finish_reason == "length" for response in responses) / len(responses),
        "scoring_failures": float(len(responses) - scored),
    }
