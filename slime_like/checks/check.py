"""Table of the checks against files, packages, names and the model's sizes, in the order of their problems.

Sections reject combinations of fields themselves (``Section.conflicts``). Needs neither torch nor Ray.
"""

from collections.abc import Iterable, Iterator, Sequence

from slime_like.checks import (
    agent,
    devices,
    directories,
    earlier_run,
    engine_arguments,
    environment,
    families,
    layout,
    lengths,
    model_directories,
    names,
    packages,
    rows,
)
from slime_like.checks.definition import Check, Needs, training_needs
from slime_like.checks.model_directories import find_dimensions
from slime_like.config.base import CONFLICT
from slime_like.config.run import RunConfig
from slime_like.errors import ConfigError, Problem, field_of
from slime_like.models.dimensions import ModelDimensions


def _nothing_to_evaluate(config: RunConfig) -> Iterator[str]:
    if not config.evaluation.files:
        yield "evaluation.files=[] is empty; give at least one held-out file"
    if config.model.weights is not None:
        yield (
            f"model.weights={config.model.weights} is not evaluated, because engines load model.path; convert it to a "
            "Hugging Face directory with `slime-like convert to-hf`"
        )


CHECKS: Sequence[Check] = (
    Check("evaluation", {"evaluation"}, _nothing_to_evaluate),
    # this machine
    Check("model.path", {"files"}, lambda config: find_dimensions(config.model.path, "model.path")[1]),
    Check("reference.model", {"files", "model", "training"}, model_directories.reference_problems),
    Check("run_dir", {"files", "run"}, directories.run_directory_problems),
    Check("debug.save-rollouts", {"files", "training"}, directories.dump_directory_problems),
    Check("data.train", {"files", "training"}, rows.training_file_problems),
    Check("evaluation.files", {"files", "data"}, rows.held_out_file_problems),
    Check("logging.packages", {"files", "training"}, packages.logging_problems),
    Check("debug.load-rollouts", {"files", "training"}, earlier_run.kept_rollout_problems),
    Check("model.weights", {"files", "trainer"}, earlier_run.start_weight_problems),
    Check("model.converted", {"files"}, earlier_run.converted_problems),
    Check("rollout.engine-installed", {"files", "engine"}, names.engine_installation_problems),
    Check("custom.code", {"files", "engine"}, names.custom_code_problems),
    Check("trainer.attention", {"files", "trainer"}, packages.attention_problems),
    Check("cluster.visible-devices", {"files", "run"}, environment.device_problems),
    Check("sync.directory", {"files", "training", "engine"}, directories.sync_directory_problems),
    Check("model.weight-files", {"files", "model", "weights"}, model_directories.model_weight_problems),
    Check("reference.weight-files", {"files", "model", "training"}, model_directories.reference_weight_problems),
    # names, and sizes that may be `auto`
    Check("trainer.backend", {"trainer"}, names.backend_name_problems),
    Check("algorithm", {"training"}, names.algorithm_name_problems),
    Check("algorithm.advantage", {"training", "engine"}, names.advantage_name_problems),
    Check("rollout.engine", {"engine"}, names.engine_name_problems),
    Check("algorithm.minibatches", {"training"}, devices.minibatch_problems),
    Check("rollout.engine-args", {"engine"}, engine_arguments.engine_problems),
    Check("cluster.gpus-idle", {"training"}, devices.idle_gpu_problems),
    Check("cluster.placement", {"training", "engine"}, devices.colocation_problems),
    Check("reward.functions", {"engine"}, names.reward_problems),
    Check("rollout.environment", {"engine"}, names.environment_problems),
    Check("rollout.agent", {"engine"}, agent.agent_problems),
    # the model's sizes
    Check("model.family", {"model", "trainer"}, families.family_problems),
    Check("trainer.layout", {"model", "trainer"}, lambda run, size: layout.layout_problems(run.trainer.parallel, size)),
    Check("rollout.tensor", {"model", "engine"}, layout.engine_rank_problems),
    Check("rollout.stop-tokens", {"model", "data"}, lengths.stop_token_problems),
    Check("rollout.length", {"model", "engine"}, lengths.length_problems),
    Check("trainer.token-budget", {"training", "engine"}, lengths.budget_problems),
    # slow checks
    Check("reward.custom", {"engine", "code"}, names.custom_reward_problems),
    Check("rollout.environment-custom", {"engine", "code"}, names.custom_environment_problems),
    Check("rollout.agent-custom", {"engine", "code"}, agent.custom_agent_problems),
)


def check(config: RunConfig, needs: Needs | None = None) -> list[Problem]:
    """Return every problem. ``needs`` defaults to the needs of training."""
    needs = training_needs(config) if needs is None else needs
    return _run(CHECKS, needs, config, find_dimensions(config.model.path, "model.path")[0])


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
    return conflicts + _run((one for one in CHECKS if "files" not in one.needs), needs, config, dimensions)


def check_machine(config: RunConfig, dimensions: ModelDimensions, needs: Needs) -> list[Problem]:
    """Return what this machine lacks: files, writable directories, packages."""
    return _run((one for one in CHECKS if "files" in one.needs), needs, config, dimensions)


def _run(checks: Iterable[Check], needs: Needs, config: RunConfig, dimensions: ModelDimensions | None) -> list[Problem]:
    return [problem for one in checks if one.needs <= needs for problem in one.find(config, dimensions)]
