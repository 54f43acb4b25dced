"""Table of the checks against files, packages, names and the model's sizes, in the order of their problems.

Sections reject combinations of fields themselves (``Section.conflicts``). Needs neither torch nor Ray.
"""

from collections.abc import Iterator, Sequence

from slime_like.checks import engine_arguments, layout, lengths, model_directories, names, packages, rows, run_files
from slime_like.checks.definition import Check, Needs, training_needs
from slime_like.checks.model_directories import find_dimensions
from slime_like.config.base import CONFLICT, known
from slime_like.config.run import RunConfig
from slime_like.config.sections import EvaluationConfig, ModelConfig
from slime_like.errors import ConfigError, Problem, field_of
from slime_like.models.dimensions import ModelDimensions

_READ = {"prompts_per_step", "max_new_tokens", "num_engines", "stop_token_ids", "ignore_eos"}
"""Settings of ``rollout`` for its batches, for ``slime-like plan``, for ``auto``, and for ends of assistant turns."""
_ONLY_TRAINING = {"samples_per_prompt", "temperature", "top_p", "top_k", "min_p", "max_staleness", "stream"}
_ONLY_TRAINING |= {"oversample", "drop_zero_spread", "max_drops_per_step"}
"""Settings of ``rollout`` that ``slime-like eval`` does not read, either."""


def _nothing_to_evaluate(evaluation: EvaluationConfig, model: ModelConfig) -> Iterator[str]:
    if not evaluation.files:
        yield "evaluation.files=[] is empty; give at least one held-out file"
    if model.lora.is_set and model.lora.path is None:
        yield f"model.lora.rank={model.lora.rank}: there are no factors to evaluate; give model.lora.path"
    if model.weights is not None:
        yield (
            f"model.weights={model.weights} is not evaluated, because engines load model.path; convert it to a "
            "Hugging Face directory with `slime-like convert to-hf`"
        )


def _unread_problems(config: RunConfig) -> Iterator[str]:
    """Name settings of engines and rewards. With held-out files, ``slime-like eval`` may read them."""
    sections = {"rollout": config.rollout, "reward": config.reward, "sync": config.sync}
    for section, values in sections.items() if config.supervised else ():
        for name in values.all_changed:
            may_be_evaluated = config.evaluation.files and section != "sync" and name not in _ONLY_TRAINING
            if name not in _READ and not may_be_evaluated:
                yield f"{section}.{name} is set, but algorithm.loss=sft has neither engines nor rewards; remove it"


CHECKS: Sequence[Check] = (
    Check("evaluation", {"evaluation"}, lambda run: _nothing_to_evaluate(run.evaluation, run.model)),
    # this machine
    Check("model.path", {"files"}, lambda run: find_dimensions(run.model.path, "model.path")[1]),
    Check("reference.model", {"files", "model", "training"}, sized=model_directories.frozen_problems),
    Check("run_dir", {"files", "run"}, lambda run: run_files.run_directory_problems(run.run_dir)),
    Check(
        "debug.save-rollouts",
        {"files", "training"},
        lambda run: run_files.writable_problems("debug.save_rollouts", run.debug.save_rollouts),
    ),
    Check("data.train", {"files", "training"}, lambda run: rows.training_file_problems(run.data, run.debug)),
    Check(
        "evaluation.files", {"files", "data"}, lambda run: rows.file_problems("evaluation.files", run.evaluation.files)
    ),
    Check("logging.packages", {"files", "training"}, lambda run: packages.logging_problems(run.logging)),
    Check("debug.load-rollouts", {"files", "training"}, run_files.kept_rollout_problems),
    Check("model.weights", {"files", "trainer"}, lambda run: run_files.start_weight_problems(run.model, run.trainer)),
    Check("model.lora", {"files", "model"}, lambda run: model_directories.lora_problems(run.model)),
    Check("model.converted", {"files"}, lambda run: run_files.converted_problems(run.model)),
    Check("rollout.engine-installed", {"files", "engine"}, lambda run: names.engine_installation_problems(run.rollout)),
    Check("custom.code", {"files", "engine"}, lambda run: names.custom_code_problems(run.reward, run.rollout)),
    Check("trainer.attention", {"files", "trainer"}, lambda run: packages.attention_problems(run.trainer, run.model)),
    Check("cluster.visible-devices", {"files", "run"}, lambda _: packages.device_problems()),
    Check("sync.directory", {"files", "training", "engine"}, lambda run: run_files.sync_directory_problems(run.sync)),
    Check(
        "model.weight-files",
        {"files", "model", "weights"},
        sized=lambda run, size: model_directories.weight_problems(run.model.path, "model.path", size),
    ),
    Check(
        "reference.weight-files",
        {"files", "model", "training"},
        lambda run: list(model_directories.frozen_weight_problems(run.roles)),
    ),
    # names, and sizes that may be `auto`
    Check("trainer.backend", {"trainer"}, lambda run: names.backend_name_problems(run.trainer.backend)),
    Check("algorithm", {"training"}, lambda run: names.algorithm_name_problems(run.algorithm)),
    Check("algorithm.demonstrations", {"training"}, _unread_problems),
    Check("algorithm.advantage", {"training", "engine"}, lambda run: names.advantage_name_problems(run.algorithm)),
    Check("rollout.engine", {"engine"}, lambda run: names.engine_name_problems(run.rollout)),
    Check(
        "algorithm.minibatches",
        {"training"},
        lambda run: lengths.minibatch_problems(run.rollout, run.algorithm, run.trainer.parallel.data),
    ),
    Check("rollout.engine-args", {"engine"}, lambda run: engine_arguments.engine_problems(run.rollout)),
    Check(
        "rollout.adapter",
        {"model", "engine"},
        sized=lambda run, size: engine_arguments.adapter_problems(run.model, run.rollout.engine, size),
    ),
    Check("cluster.gpus-idle", {"training"}, lengths.idle_gpu_problems),
    Check(
        "cluster.placement",
        {"training", "engine"},
        lambda run: lengths.colocation_problems(run.rollout, run.cluster, run.trainer.parallel.world_size),
    ),
    Check(
        "rollout.nodes",
        {"engine"},
        lambda run: lengths.engine_node_problems(
            run.rollout, run.cluster.gpus_per_node, run.model.lora.sends_factors, run.algorithm.routing_replay
        ),
    ),
    Check("reward.functions", {"engine"}, lambda run: names.reward_problems(run.reward)),
    Check("rollout.environment", {"engine"}, lambda run: names.environment_problems(run.rollout.environment)),
    Check("rollout.agent", {"engine"}, lambda run: names.agent_problems(run.rollout.agent, run.reward, run.cluster)),
    # the model's sizes
    Check("model.adapter", {"files", "model"}, sized=lambda run, _: model_directories.factor_problems(run.model)),
    Check("model.family", {"model", "trainer"}, sized=layout.family_problems),
    Check(
        "trainer.layout",
        {"model", "trainer"},
        sized=lambda run, size: layout.layout_problems(run.trainer.parallel, size),
    ),
    Check(
        "rollout.tensor", {"model", "engine"}, sized=lambda run, size: layout.engine_rank_problems(run.rollout, size)
    ),
    Check(
        "rollout.stop-tokens", {"model", "data"}, sized=lambda run, size: lengths.stop_token_problems(run.rollout, size)
    ),
    Check("rollout.length", {"model", "engine"}, sized=lengths.length_problems),
    Check("trainer.token-budget", {"training", "engine"}, lengths.budget_problems),
    # slow checks
    Check("algorithm.options", {"training", "code"}, lambda run: names.option_problems(run.algorithm)),
    Check(
        "reward.custom",
        {"engine", "code"},
        lambda run: names.custom_reward_problems(run.reward, run.data, run.evaluation),
    ),
    Check(
        "rollout.environment-custom",
        {"engine", "code"},
        lambda run: names.custom_environment_problems(run.rollout.environment, run.data, run.evaluation),
    ),
    Check(
        "rollout.agent-custom",
        {"engine", "code"},
        lambda run: names.custom_agent_problems(run.rollout.agent, run.cluster),
    ),
)


def check(config: RunConfig, needs: Needs | None = None) -> list[Problem]:
    """Return every problem. ``needs`` defaults to the needs of training."""
    needs = training_needs(config) if needs is None else needs
    dimensions = next(known(lambda: find_dimensions(config.model.path, "model.path")[:1]), None)
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
            sized = () if dimensions is None else known(one.sized, config, dimensions)
            texts = dict.fromkeys((*known(one.run, config), *sized))  # several teachers may have the same problem
            problems += [Problem(one.code, text, field_of(text)) for text in texts]
    return problems
