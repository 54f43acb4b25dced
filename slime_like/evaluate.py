"""Held-out accuracy of a Hugging Face model, by the engines and rewards that training uses; no trainer is started."""

from __future__ import annotations

from contextlib import ExitStack

from slime_like.config import RunConfig
from slime_like.data.prompts import load_tokenizer
from slime_like.orchestration.bundles import bundle_sizes
from slime_like.orchestration.cluster import Cluster
from slime_like.orchestration.evaluation import EvaluationResult, Evaluator, held_out
from slime_like.orchestration.placement import Placement
from slime_like.orchestration.scoring import Scorer
from slime_like.orchestration.session import launch_engines


def evaluate(config: RunConfig) -> EvaluationResult:
    """Sample ``evaluation.samples_per_prompt`` responses to every held-out prompt from ``model.path`` and score them.

    Raises:
        SlimeLikeError: in one sentence; every process has ended by then.
    """
    config.run_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(config.model.path)
    datasets = held_out(config, tokenizer)
    with ExitStack() as stack:
        slots = sum(bundle_sizes(config, with_trainers=False))
        stack.enter_context(Cluster(config.cluster, config.run_dir / "evaluation_worker_logs", slots))
        placement = stack.enter_context(Placement(config, with_trainers=False))
        engines, pool = launch_engines(config, stack, placement)
        pool.start()
        engines.start()
        return Evaluator(config, engines, Scorer(config, pool, tokenizer), datasets).run(step=0)
