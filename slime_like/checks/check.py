"""All checks, in the order in which their problems are shown, and the runner of those that a command needs.

Needs neither torch nor Ray, so that every problem is found before anything starts.
"""

from collections.abc import Iterable, Sequence

from slime_like.checks import (
    agent,
    directories,
    earlier_run,
    engine_arguments,
    environment,
    evaluation,
    families,
    fsdp,
    layout,
    lengths,
    model_directories,
    names,
    offload,
    packages,
    prefixes,
    rows,
    sampling,
    schedule,
    weight_sync,
)
from slime_like.checks.definition import Check, Needs, training_needs
from slime_like.checks.model_directories import find_dimensions
from slime_like.config.run import RunConfig
from slime_like.errors import ConfigError, Problem
from slime_like.models.dimensions import ModelDimensions

CHECKS: Sequence[Check] = (
    Check("evaluation.no-files", {"evaluation"}, evaluation.held_out_problems),
    Check("evaluation.weights", {"evaluation"}, evaluation.evaluated_model_problems),
    # of this machine
    Check("model.path", {"files"}, lambda config: find_dimensions(config.model.path, "model.path")[1]),
    Check("reference.model", {"files", "model", "training"}, model_directories.reference_problems),
    Check("run_dir", {"files", "run"}, directories.run_directory_problems),
    Check("debug.save-rollouts", {"files", "training"}, directories.dump_directory_problems),
    Check("data.train", {"files", "training"}, rows.training_file_problems),
    Check("data.mixture-files", {"files", "training"}, rows.source_file_problems),
    Check("evaluation.files", {"files", "data"}, rows.held_out_file_problems),
    Check("logging.packages", {"files", "training"}, packages.logging_problems),
    Check("resume", {"files", "training"}, earlier_run.resume_problems),
    Check("debug.load-rollouts", {"files", "training"}, earlier_run.kept_rollout_problems),
    Check("model.weights", {"files"}, earlier_run.start_weight_problems),
    Check("model.weights-backend", {"files", "trainer"}, earlier_run.weight_backend_problems),
    Check("model.converted", {"files"}, earlier_run.converted_problems),
    Check("rollout.agent-server", {"files", "engine"}, agent.server_problems),
    Check("rollout.engine-installed", {"files", "engine"}, names.engine_installation_problems),
    Check("custom.code", {"files", "engine"}, names.custom_code_problems),
    Check("trainer.attention", {"files", "trainer"}, packages.attention_problems),
    Check("trainer.cpu-kernels", {"files", "run"}, packages.compiler_problems),
    Check("cluster.visible-devices", {"files", "run"}, environment.device_problems),
    Check("sync.directory", {"files", "training", "engine"}, directories.sync_directory_problems),
    Check("model.weight-files", {"files", "model", "weights"}, model_directories.model_weight_problems),
    Check("reference.weight-files", {"files", "model", "training"}, model_directories.reference_weight_problems),
    # of settings alone
    Check("rollout.python", {"engine"}, names.interpreter_name_problems),
    Check("trainer.backend", {"trainer"}, names.backend_name_problems),
    Check("trainer.backend-args", {"trainer"}, names.backend_argument_problems),
    Check("data.messages-key", {"training"}, rows.conversation_problems),
    Check("data.prompts", {"training"}, rows.prompt_problems),
    Check("data.mixture", {"training"}, rows.mixture_problems),
    Check("algorithm.loss", {"training"}, names.loss_name_problems),
    Check("algorithm.advantage", {"training", "engine"}, names.advantage_name_problems),
    Check("algorithm.kl-estimator", {"training"}, names.kl_name_problems),
    Check("algorithm.importance-correction", {"training"}, names.correction_name_problems),
    Check("rollout.engine", {"engine"}, names.engine_name_problems),
    Check("trainer.fsdp", {"trainer"}, fsdp.fsdp_problems),
    Check("trainer.share-prefixes", {"trainer"}, prefixes.prefix_problems),
    Check("algorithm.minibatches", {"training"}, schedule.minibatch_problems),
    Check("trainer.schedule", {"training"}, schedule.schedule_problems),
    Check("rollout.stream", {"training"}, sampling.streaming_problems),
    Check("trainer.offload", {"training"}, offload.megatron_offload_problems),
    Check("rollout.engine-args", {"engine"}, engine_arguments.engine_problems),
    Check("cluster.gpus-idle", {"training"}, weight_sync.idle_gpu_problems),
    Check("cluster.placement", {"training", "engine"}, weight_sync.colocation_problems),
    Check("sync.transport", {"training", "engine"}, weight_sync.transport_problems),
    Check("rollout.sampling", {"training", "engine"}, sampling.sampling_problems),
    Check("evaluation.every", {"training", "engine"}, evaluation.interval_problems),
    Check("evaluation.sampling", {"engine"}, evaluation.held_out_sampling_problems),
    Check("reference.unused", {"training", "engine"}, model_directories.unused_reference_problems),
    Check("reward.functions", {"engine"}, names.reward_problems),
    Check("rollout.environment", {"engine"}, names.environment_problems),
    Check("rollout.agent", {"engine"}, agent.agent_problems),
    Check("rollout.agent-rows", {"training", "engine"}, agent.row_problems),
    # of the model's sizes
    Check("model.family", {"model", "trainer"}, families.family_problems),
    Check("trainer.layout", {"model", "trainer"}, layout.trainer_layout_problems),
    Check("trainer.latent-attention", {"model", "trainer"}, families.latent_problems),
    Check("algorithm.balancing", {"model", "trainer"}, families.balancing_problems),
    Check("rollout.tensor", {"model", "engine"}, layout.engine_rank_problems),
    Check("rollout.stop-tokens", {"model", "data"}, lengths.stop_token_problems),
    Check("rollout.length", {"model", "engine"}, lengths.rollout_length_problems),
    Check("trainer.token-budget", {"training", "engine"}, lengths.budget_problems),
    Check("rollout.agent-length", {"training", "engine"}, lengths.agent_length_problems),
    Check("evaluation.length", {"model", "engine"}, lengths.held_out_length_problems),
    Check("rollout.max-model-len", {"model", "engine"}, lengths.served_length_problems),
    # of what takes longest
    Check("reward.custom", {"engine", "code"}, names.custom_reward_problems),
    Check("rollout.environment-custom", {"engine", "code"}, names.custom_environment_problems),
    Check("rollout.agent-custom", {"engine", "code"}, agent.custom_agent_problems),
    Check("model.tokenizer", {"files", "rows", "data"}, rows.tokenizer_problems),
    Check("data.rows", {"files", "rows", "training"}, rows.training_row_problems),
    Check("evaluation.rows", {"files", "rows", "engine"}, rows.held_out_row_problems),
)


def selected(needs: Needs) -> list[Check]:
    """The checks that apply to a command with these needs, in the order in which problems are shown."""
    return [check for check in CHECKS if check.needs <= needs]


def check(config: RunConfig, needs: Needs | None = None) -> list[Problem]:
    """Every problem that is found without reading rows; ``needs`` default to those of training."""
    needs = training_needs(config) if needs is None else needs
    return _run(selected(needs), config, find_dimensions(config.model.path, "model.path")[0])


def require_valid(config: RunConfig, needs: Needs | None = None) -> None:
    """Reject a wrong configuration before anything starts.

    Raises:
        ConfigError: with every problem that ``check`` finds, and with what is wrong with the data where it finds any.
    """
    needs = training_needs(config) if needs is None else needs
    if problems := check(config, needs):
        raise ConfigError(problems + _check_rows(config, needs))


def check_settings(config: RunConfig, dimensions: ModelDimensions, needs: Needs) -> list[Problem]:
    """Problems that are the same on every machine, for a model of these sizes."""
    return _run((one for one in selected(needs) if "files" not in one.needs), config, dimensions)


def check_machine(config: RunConfig, dimensions: ModelDimensions, needs: Needs) -> list[Problem]:
    """What this machine lacks: files, directories that can be written, packages."""
    return _run((one for one in selected(needs) if "files" in one.needs), config, dimensions)


def _check_rows(config: RunConfig, needs: Needs) -> list[Problem]:
    """A missing tokenizer, and the first bad row of each file, as far as it is found without a tokenizer."""
    reading = [one for one in selected(needs | {"rows"}) if "rows" in one.needs]
    return list({problem.text: problem for problem in _run(reading, config, None)}.values())


def _run(checks: Iterable[Check], config: RunConfig, dimensions: ModelDimensions | None) -> list[Problem]:
    return [problem for one in checks for problem in one.find(config, dimensions)]
