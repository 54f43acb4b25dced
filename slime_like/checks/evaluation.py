"""Requirements of held-out evaluation: during training, and by ``slime-like eval``."""

from collections.abc import Iterator

from slime_like.checks.sampling import temperature_problem
from slime_like.config.rollout import MIN_TEMPERATURE
from slime_like.config.run import RunConfig


def held_out_problems(config: RunConfig) -> Iterator[str]:
    if not config.evaluation.files:
        yield "evaluation.files=[] is empty; give at least one held-out file"


def evaluated_model_problems(config: RunConfig) -> Iterator[str]:
    if config.model.weights is not None:
        yield (
            f"model.weights={config.model.weights}: engines are evaluated, and they load model.path; make a Hugging "
            "Face directory of it with `slime-like convert to-hf`"
        )


def interval_problems(config: RunConfig) -> Iterator[str]:
    evaluation = config.evaluation
    if evaluation.every > 0 and not evaluation.files:
        yield f"evaluation.every={evaluation.every}, but evaluation.files is empty; give held-out files, or every: 0"


def held_out_sampling_problems(config: RunConfig) -> Iterator[str]:
    evaluation = config.evaluation
    if 0 < evaluation.temperature < MIN_TEMPERATURE:
        yield (
            f"evaluation.temperature={evaluation.temperature} is lower than engines sample at; use 0 (greedy), or at "
            f"least {MIN_TEMPERATURE}"
        )
    if evaluation.files and (problem := temperature_problem(config, "evaluation.temperature", evaluation.temperature)):
        yield problem
    if evaluation.temperature == 0 and evaluation.samples_per_prompt > 1:
        yield (
            f"evaluation.samples_per_prompt={evaluation.samples_per_prompt} at evaluation.temperature=0 samples the "
            "same response again and again; use 1, or a temperature above 0"
        )
