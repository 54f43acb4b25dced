"""Held-out accuracy of a Hugging Face model, with the engines and rewards that training uses. No trainer is started.

Engines and reward workers start concurrently, and all engines sample concurrently. After the last response is sampled,
all reward workers score in parallel.
"""

import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from slime_like.config import RunConfig
from slime_like.config.algorithm import AlgorithmConfig
from slime_like.config.rollout import RolloutConfig, SyncConfig
from slime_like.config.sections import DebugConfig, DistillationConfig, ModelConfig, ReferenceConfig
from slime_like.config.trainer import TrainerConfig
from slime_like.models.tokenization import load_tokenizer
from slime_like.observability.progress import Progress
from slime_like.observability.tables import held_out_rows
from slime_like.orchestration.cluster.bundles import pieces_of
from slime_like.orchestration.cluster.cluster import Cluster
from slime_like.orchestration.cluster.placement import Placement
from slime_like.orchestration.rollout.evaluation import EvaluationResult, Evaluator, held_out
from slime_like.orchestration.rollout.requests import stop_tokens
from slime_like.orchestration.rollout.scoring import Scorer
from slime_like.orchestration.run.directory import run_directory
from slime_like.orchestration.run.engines import launch_engines
from slime_like.system.disk import whole_file


def evaluate(config: RunConfig, temporary: bool = False, keep_all: bool = False) -> EvaluationResult:
    """Sample ``evaluation.samples_per_prompt`` responses to every held-out prompt from ``model.path`` and score them.

    Args:
        temporary: whether the user named no run directory; it is removed after success.
        keep_all: whether the result keeps all responses, for ``write_responses``.

    Raises:
        SlimeLikeError: in one sentence; all processes have ended.
    """
    config = engines_alone(config)
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    datasets = held_out(config, tokenizer)
    with ExitStack() as stack:
        run_dir = stack.enter_context(run_directory(config.run_dir, temporary))
        progress = stack.enter_context(Progress(config.logging.progress, total_steps=0))
        slots = sum(pieces_of(config, with_trainers=False).bundles)
        with progress.waiting("starting Ray"):
            stack.enter_context(Cluster(config.cluster, run_dir / "evaluation_worker_logs", slots, note=progress.note))
            placement = stack.enter_context(Placement(config, with_trainers=False))
        engines, pool = launch_engines(config, stack, placement, progress.note)
        with progress.waiting("starting reward workers"):
            pool.start()  # engines load the model in the meantime
        with progress.waiting("engines", len(engines.instances)) as waiting:
            engines.start(waiting.on_waiting)
        scorer = Scorer(config, pool, tokenizer, stop_tokens(config.rollout, config.model))
        return Evaluator(config, engines, scorer, datasets).run(0, progress, keep_all)


def write_responses(model: ModelConfig, result: EvaluationResult, output: Path) -> None:
    """Write the responses as JSONL, one row each, with the columns of the held-out table except the step."""
    tokenizer = load_tokenizer(model.path, model.trust_remote_code)
    rows = held_out_rows(0, result.samples, partial(tokenizer.decode, clean_up_tokenization_spaces=False))
    with whole_file(output) as file:
        for row in rows:
            del row["Step"]
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def engines_alone(config: RunConfig) -> RunConfig:
    """Return the configuration of engines without trainers: separate devices and default training settings."""
    samples = RolloutConfig.model_fields["samples_per_prompt"].get_default()
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"samples_per_prompt": samples}),
            "cluster": config.cluster.model_copy(update={"placement": "separate"}),
            "trainer": TrainerConfig(start_timeout_s=config.trainer.start_timeout_s),
            "reference": ReferenceConfig(),
            "distillation": DistillationConfig(),
            "sync": SyncConfig(),
            "algorithm": AlgorithmConfig(),
            "data": config.data.model_copy(update={"messages_key": None}),  # held-out rows are no demonstrations
            "debug": DebugConfig(),
        }
    )
