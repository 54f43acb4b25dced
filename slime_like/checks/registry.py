"""All checks, in the order in which their problems are shown."""

from collections.abc import Sequence

from slime_like.checks import (
    attention,
    checkpoint_backend,
    directories,
    earlier_run,
    engine_arguments,
    evaluation,
    families,
    fsdp,
    latent,
    layout,
    lengths,
    model_directories,
    names,
    offload,
    packages,
    rows,
    sampling,
    schedule,
    user_code,
    weight_sync,
)
from slime_like.checks.definition import Check, ModelCheck

_MACHINE: Sequence[Check] = (
    Check("model.path", {"files"}, model_directories.model_problems),
    ModelCheck("reference.model", {"files", "model", "training"}, model_directories.reference_problems),
    Check("run_dir", {"files", "run"}, directories.run_directory_problems),
    Check("debug.save-rollouts", {"files", "training"}, directories.dump_directory_problems),
    Check("data.train", {"files", "training"}, rows.training_file_problems),
    Check("evaluation.files", {"files", "data"}, rows.held_out_file_problems),
    Check("logging.packages", {"files", "training"}, packages.logging_problems),
    Check("resume", {"files", "training"}, earlier_run.resume_problems),
    Check("debug.load-rollouts", {"files", "training"}, earlier_run.kept_rollout_problems),
    Check("model.weights", {"files"}, checkpoint_backend.start_weight_problems),
    Check("model.weights-backend", {"files", "trainer"}, checkpoint_backend.weight_backend_problems),
    Check("model.converted", {"files"}, checkpoint_backend.converted_problems),
    Check("trainer.attention", {"files", "trainer"}, attention.attention_problems),
    Check("trainer.cpu-kernels", {"files", "run"}, packages.compiler_problems),
    Check("sync.directory", {"files", "training", "engine"}, directories.sync_directory_problems),
    ModelCheck("model.weight-files", {"files", "model", "weights"}, model_directories.model_weight_problems),
    Check("reference.weight-files", {"files", "model", "training"}, model_directories.reference_weight_problems),
)

_SETTINGS: Sequence[Check] = (
    Check("rollout.python", {"engine"}, names.interpreter_name_problems),
    Check("trainer.backend", {"trainer"}, names.backend_name_problems),
    Check("algorithm.loss", {"training"}, names.loss_name_problems),
    Check("algorithm.advantage", {"training", "engine"}, names.advantage_name_problems),
    Check("rollout.engine", {"engine"}, names.engine_name_problems),
    Check("trainer.fsdp", {"trainer"}, fsdp.fsdp_problems),
    Check("algorithm.minibatches", {"training"}, schedule.minibatch_problems),
    Check("trainer.schedule", {"training"}, schedule.schedule_problems),
    Check("rollout.stream", {"training"}, sampling.streaming_problems),
    Check("trainer.offload", {"training"}, offload.megatron_offload_problems),
    Check(
        "rollout.engine-args",
        {"engine"},
        lambda config: engine_arguments.engine_problems(config.rollout.engine, config.rollout),
    ),
    Check("cluster.placement", {"training", "engine"}, weight_sync.colocation_problems),
    Check("sync.transport", {"training", "engine"}, weight_sync.transport_problems),
    Check("rollout.sampling", {"training", "engine"}, sampling.sampling_problems),
    Check("evaluation.every", {"training", "engine"}, evaluation.interval_problems),
    Check("evaluation.sampling", {"engine"}, evaluation.held_out_sampling_problems),
    Check("reward.functions", {"engine"}, user_code.reward_problems),
    Check("rollout.environment", {"engine"}, user_code.environment_problems),
)

_SIZES: Sequence[Check] = (
    ModelCheck("model.family", {"model", "trainer"}, families.family_problems),
    ModelCheck(
        "trainer.layout",
        {"model", "trainer"},
        lambda config, model: layout.layout_problems(config.trainer.parallel, model),
    ),
    ModelCheck(
        "trainer.latent-attention",
        {"model", "trainer"},
        lambda config, model: latent.latent_problems(config.trainer, model),
    ),
    ModelCheck("algorithm.balancing", {"model", "trainer"}, families.balancing_problems),
    ModelCheck(
        "rollout.tensor", {"model", "engine"}, lambda config, model: layout.engine_rank_problems(config.rollout, model)
    ),
    ModelCheck("rollout.stop-tokens", {"model", "data"}, lengths.stop_token_problems),
    ModelCheck("rollout.length", {"model", "engine"}, lengths.rollout_length_problems),
    Check("trainer.token-budget", {"model", "training", "engine"}, lengths.budget_problems),
    ModelCheck("evaluation.length", {"model", "engine"}, lengths.held_out_length_problems),
    ModelCheck("rollout.max-model-len", {"model", "engine"}, lengths.served_length_problems),
)

_ROWS: Sequence[Check] = (
    Check("model.tokenizer", {"rows", "data"}, rows.tokenizer_problems),
    Check("data.rows", {"rows", "training"}, rows.training_row_problems),
    Check("evaluation.rows", {"rows", "engine"}, rows.held_out_row_problems),
)

CHECKS: Sequence[Check] = (
    Check("evaluation.no-files", {"evaluation"}, evaluation.held_out_problems),
    Check("evaluation.weights", {"evaluation"}, evaluation.evaluated_model_problems),
    *_MACHINE,
    *_SETTINGS,
    *_SIZES,
    Check("reward.custom", {"engine", "code"}, user_code.custom_reward_problems),
    *_ROWS,
)
