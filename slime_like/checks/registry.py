"""All checks, in the order in which their problems are shown."""

from collections.abc import Sequence

from slime_like.checks.attention import attention_problems
from slime_like.checks.compiler import compiler_problems
from slime_like.checks.data_files import held_out_file_problems, training_file_problems
from slime_like.checks.definition import Check, ModelCheck
from slime_like.checks.directories import dump_directory_problems, run_directory_problems, sync_directory_problems
from slime_like.checks.earlier_run import kept_rollout_problems, resume_problems
from slime_like.checks.engine_arguments import engine_problems
from slime_like.checks.evaluation import (
    evaluated_model_problems,
    held_out_problems,
    held_out_sampling_problems,
    interval_problems,
)
from slime_like.checks.families import balancing_problems, family_problems
from slime_like.checks.fsdp import fsdp_problems
from slime_like.checks.latent import latent_problems
from slime_like.checks.layout import engine_rank_problems, layout_problems
from slime_like.checks.lengths import (
    budget_problems,
    held_out_length_problems,
    rollout_length_problems,
    served_length_problems,
    stop_token_problems,
)
from slime_like.checks.logging_packages import logging_problems
from slime_like.checks.model_directories import (
    model_problems,
    model_weight_problems,
    reference_problems,
    reference_weight_problems,
)
from slime_like.checks.names import (
    advantage_name_problems,
    backend_name_problems,
    engine_name_problems,
    interpreter_name_problems,
    loss_name_problems,
)
from slime_like.checks.offload import megatron_offload_problems
from slime_like.checks.rows import held_out_row_problems, tokenizer_problems, training_row_problems
from slime_like.checks.sampling import sampling_problems, streaming_problems
from slime_like.checks.schedule import minibatch_problems, schedule_problems
from slime_like.checks.start_weights import converted_problems, start_weight_problems, weight_backend_problems
from slime_like.checks.user_code import custom_reward_problems, environment_problems, reward_problems
from slime_like.checks.weight_sync import colocation_problems, transport_problems

_MACHINE: Sequence[Check | ModelCheck] = (
    Check("model.path", {"files"}, model_problems),
    ModelCheck("reference.model", {"files", "model", "training"}, reference_problems),
    Check("run_dir", {"files", "run"}, run_directory_problems),
    Check("debug.save-rollouts", {"files", "training"}, dump_directory_problems),
    Check("data.train", {"files", "training"}, training_file_problems),
    Check("evaluation.files", {"files", "data"}, held_out_file_problems),
    Check("logging.packages", {"files", "training"}, logging_problems),
    Check("resume", {"files", "training"}, resume_problems),
    Check("debug.load-rollouts", {"files", "training"}, kept_rollout_problems),
    Check("model.weights", {"files"}, start_weight_problems),
    Check("model.weights-backend", {"files", "trainer"}, weight_backend_problems),
    Check("model.converted", {"files"}, converted_problems),
    Check("trainer.attention", {"files", "trainer"}, attention_problems),
    Check("trainer.cpu-kernels", {"files", "run"}, compiler_problems),
    Check("sync.directory", {"files", "training", "engine"}, sync_directory_problems),
    ModelCheck("model.weight-files", {"files", "model", "weights"}, model_weight_problems),
    Check("reference.weight-files", {"files", "model", "training"}, reference_weight_problems),
)

_SETTINGS: Sequence[Check | ModelCheck] = (
    Check("rollout.python", {"engine"}, interpreter_name_problems),
    Check("trainer.backend", {"trainer"}, backend_name_problems),
    Check("algorithm.loss", {"training"}, loss_name_problems),
    Check("algorithm.advantage", {"training", "engine"}, advantage_name_problems),
    Check("rollout.engine", {"engine"}, engine_name_problems),
    Check("trainer.fsdp", {"trainer"}, fsdp_problems),
    Check("algorithm.minibatches", {"training"}, minibatch_problems),
    Check("trainer.schedule", {"training"}, schedule_problems),
    Check("rollout.stream", {"training"}, streaming_problems),
    Check("trainer.offload", {"training"}, megatron_offload_problems),
    Check("rollout.engine-args", {"engine"}, lambda config: engine_problems(config.rollout.engine, config.rollout)),
    Check("cluster.placement", {"training", "engine"}, colocation_problems),
    Check("sync.transport", {"training", "engine"}, transport_problems),
    Check("rollout.sampling", {"training", "engine"}, sampling_problems),
    Check("evaluation.every", {"training", "engine"}, interval_problems),
    Check("evaluation.sampling", {"engine"}, held_out_sampling_problems),
    Check("reward.functions", {"engine"}, reward_problems),
    Check("rollout.environment", {"engine"}, environment_problems),
)

_SIZES: Sequence[Check | ModelCheck] = (
    ModelCheck("model.family", {"model", "trainer"}, family_problems),
    ModelCheck(
        "trainer.layout", {"model", "trainer"}, lambda config, model: layout_problems(config.trainer.parallel, model)
    ),
    ModelCheck(
        "trainer.latent-attention", {"model", "trainer"}, lambda config, model: latent_problems(config.trainer, model)
    ),
    ModelCheck("algorithm.balancing", {"model", "trainer"}, balancing_problems),
    ModelCheck(
        "rollout.tensor", {"model", "engine"}, lambda config, model: engine_rank_problems(config.rollout, model)
    ),
    ModelCheck("rollout.stop-tokens", {"model", "data"}, stop_token_problems),
    ModelCheck("rollout.length", {"model", "engine"}, rollout_length_problems),
    Check("trainer.token-budget", {"model", "training", "engine"}, budget_problems),
    ModelCheck("evaluation.length", {"model", "engine"}, held_out_length_problems),
    ModelCheck("rollout.max-model-len", {"model", "engine"}, served_length_problems),
)

_ROWS: Sequence[Check | ModelCheck] = (
    Check("model.tokenizer", {"rows", "data"}, tokenizer_problems),
    Check("data.rows", {"rows", "training"}, training_row_problems),
    Check("evaluation.rows", {"rows", "engine"}, held_out_row_problems),
)

CHECKS: Sequence[Check | ModelCheck] = (
    Check("evaluation.no-files", {"evaluation"}, held_out_problems),
    Check("evaluation.weights", {"evaluation"}, evaluated_model_problems),
    *_MACHINE,
    *_SETTINGS,
    *_SIZES,
    Check("reward.custom", {"engine", "code"}, custom_reward_problems),
    *_ROWS,
)
