"""Table of the checks against files, packages, names and the model's sizes, in the order of their problems.

Sections reject combinations of fields themselves (``Section.conflicts``). Needs neither torch nor Ray.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from slime_like.checks import (
    Check,
    Needs,
    engines,
    layout,
    model_directories,
    names,
    packages,
    run_files,
    training_needs,
)
from slime_like.checks.layout import layout_problems
from slime_like.checks.model_directories import find_dimensions
from slime_like.config.base import CONFLICT, until_invalid
from slime_like.config.run import RunConfig
from slime_like.errors import ConfigError, Problem, field_of
from slime_like.models.dimensions import ModelDimensions

_READ = {"prompts_per_step", "max_new_tokens", "num_engines", "stop_token_ids", "ignore_eos"}
"""Settings of ``rollout`` for its batches, for ``slime-like plan``, for ``auto``, and for ends of assistant turns."""
_ONLY_TRAINING = {"samples_per_prompt", "temperature", "top_p", "top_k", "min_p", "max_staleness", "stream"}
_ONLY_TRAINING |= {"oversample", "drop_zero_spread", "max_drops_per_step"}
"""Settings of ``rollout`` that ``slime-like eval`` does not read, either."""


def _nothing_to_evaluate(config: RunConfig) -> Iterator[str]:
    evaluation, model = config.evaluation, config.model
    if not evaluation.files:
        yield "evaluation.files=[] is empty; give at least one held-out file"
    if model.lora.is_set and model.lora.path is None:
        yield f"model.lora.rank={model.lora.rank}: there are no factors to evaluate; give model.lora.path"
    if model.weights is not None:
        yield f"model.weights={model.weights} is not what engines load; use `slime-like convert to-hf`"


def _unread_problems(config: RunConfig) -> Iterator[str]:
    """Name settings of engines and rewards. With held-out files, ``slime-like eval`` may read them."""
    sections = {"rollout": config.rollout, "reward": config.reward, "sync": config.sync}
    for section, values in sections.items() if config.supervised else ():
        for name in values.all_changed:
            may_be_evaluated = config.evaluation.files and section != "sync" and name not in _ONLY_TRAINING
            if name not in _READ and not may_be_evaluated:
                yield f"{section}.{name} is set, but demonstrations need neither engines nor rewards; remove it"


def _writable(field: str) -> Callable[[RunConfig], Iterator[str]]:
    return lambda run: run_files.writable_problems(field, attrgetter(field)(run))


CHECKS: Sequence[Check] = (
    Check("evaluation", {"evaluation"}, _nothing_to_evaluate),
    # this machine
    Check("model.path", {"files"}, lambda run: find_dimensions(run.model.path, "model.path")[1]),
    Check("reference.model", {"files", "model", "training"}, sized=model_directories.frozen_problems),
    Check("run_dir", {"files", "run"}, run_files.run_directory_problems),
    Check(
        "debug.save-rollouts",
        {"files", "training"},
        _writable("debug.save_rollouts"),
    ),
    Check("data.train", {"files", "training"}, names.training_file_problems),
    Check("evaluation.files", {"files", "data"}, names.held_out_file_problems),
    Check("logging.packages", {"files", "training"}, packages.logging_problems),
    Check("debug.load-rollouts", {"files", "training"}, run_files.kept_rollout_problems),
    Check("model.weights", {"files", "trainer"}, run_files.start_weight_problems),
    Check("model.lora", {"files", "model"}, model_directories.lora_problems),
    Check("model.converted", {"files"}, run_files.converted_problems),
    Check("rollout.engine-installed", {"files", "engine"}, engines.installation_problems),
    Check("custom.code", {"files", "engine"}, names.custom_code_problems),
    Check("trainer.attention", {"files", "trainer"}, lambda run: packages.attention_problems(run.trainer, run.model)),
    Check("cluster.visible-devices", {"files", "run"}, packages.device_problems),
    Check("sync.directory", {"files", "training", "engine"}, _writable("sync.directory")),
    Check("model.weight-files", {"files", "model", "weights"}, sized=model_directories.weight_problems),
    Check("reference.weight-files", {"files", "model", "training"}, model_directories.frozen_weight_problems),
    # names, and sizes that may be `auto`
    Check("trainer.backend", {"trainer"}, names.backend_name_problems),
    Check("algorithm", {"training"}, lambda run: names.algorithm_name_problems(run.algorithm)),
    Check("algorithm.demonstrations", {"training"}, _unread_problems),
    Check("algorithm.advantage", {"training", "engine"}, lambda run: names.advantage_name_problems(run.algorithm)),
    Check("rollout.engine", {"engine"}, engines.name_problems),
    Check("algorithm.minibatches", {"training"}, layout.minibatch_problems),
    Check("rollout.engine-args", {"engine"}, engines.argument_problems),
    Check("rollout.temperature", {"engine"}, engines.temperature_problems),
    Check("rollout.adapter", {"model", "engine"}, sized=engines.adapter_problems),
    Check("cluster.gpus-idle", {"training"}, layout.idle_gpu_problems),
    Check("cluster.placement", {"training", "engine"}, layout.colocation_problems),
    Check("rollout.nodes", {"engine"}, engines.node_problems),
    Check("reward.functions", {"engine"}, names.reward_problems),
    Check("rollout.environment", {"engine"}, names.environment_problems),
    Check("rollout.agent", {"engine"}, names.agent_problems),
    # the model's sizes
    Check("model.adapter", {"files", "model"}, sized=model_directories.factor_problems),
    Check("model.family", {"model", "trainer"}, sized=layout.family_problems),
    Check(
        "trainer.layout",
        {"model", "trainer"},
        sized=lambda run, size: layout_problems(run.trainer.parallel, size),
    ),
    Check("rollout.tensor", {"model", "engine"}, sized=engines.rank_problems),
    Check("rollout.stop-tokens", {"model", "data"}, sized=layout.stop_token_problems),
    Check("rollout.length", {"model", "engine"}, sized=layout.length_problems),
    Check("trainer.token-budget", {"training", "engine"}, layout.budget_problems),
    # slow checks
    Check("algorithm.options", {"training", "code"}, lambda run: names.option_problems(run.algorithm)),
    Check("reward.custom", {"engine", "code"}, names.custom_reward_problems),
    Check("rollout.environment-custom", {"engine", "code"}, names.custom_environment_problems),
    Check("rollout.agent-custom", {"engine", "code"}, names.custom_agent_problems),
)


def check(config: RunConfig, needs: Needs | None = None) -> list[Problem]:
    """Return every problem. ``needs`` defaults to the needs of training."""
    needs = training_needs(config) if needs is None else needs
    dimensions = next(until_invalid(lambda: find_dimensions(config.model.path, "model.path")[:1]), None)
    return _run(needs, config, dimensions)


def require_valid(config: RunConfig, needs: Needs | None = None) -> None:
    """Reject a wrong configuration before anything starts.

    Raises:
        ConfigError: contains every problem that ``check`` finds.
    """
    if problems := check(config, needs):
        raise ConfigError(problems)


def check_settings(config: RunConfig, dimensions: ModelDimensions, needs: Needs) -> list[Problem]:
    """Return the problems that do not depend on the machine, for a model of these sizes.

    The configuration may be a ``model_copy``, whose combinations of fields pydantic has not validated.
    """
    conflicts = [Problem(CONFLICT, text, field_of(text)) for text in config.all_conflicts()]
    return conflicts + _run(needs - {"files"}, config, dimensions)


def _run(needs: Needs, config: RunConfig, dimensions: ModelDimensions | None) -> list[Problem]:
    problems = []
    for one in CHECKS:
        if one.needs <= needs:
            sized = () if dimensions is None else until_invalid(one.sized, config, dimensions)
            texts = dict.fromkeys(
                (*until_invalid(one.run, config), *sized)
            )  # several teachers may have the same problem
            problems += [Problem(one.code, text, field_of(text)) for text in texts]
    return problems
