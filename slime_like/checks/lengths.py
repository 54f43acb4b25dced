"""Checks of sizes that must fit each other: replicas, engines, GPUs, minibatches, and lengths of sequences."""

from collections.abc import Iterator

from slime_like.config.filling import AUTO, ENGINES, REPLICAS, gpus_needed
from slime_like.config.run import RunConfig
from slime_like.models.dimensions import ModelDimensions
from slime_like.system.words import pluralize

_BUDGET = "trainer.target_tokens_per_batch"


def idle_gpu_problems(config: RunConfig) -> Iterator[str]:
    cluster, needed = config.cluster, gpus_needed(config)
    if cluster.nodes is None or cluster.allow_idle_gpus:
        return
    gpus = cluster.nodes * cluster.gpus_per_node
    if needed.total < gpus:
        replica = config.trainer.parallel.world_size // config.trainer.parallel.data
        if gpus % replica and cluster.placement == "colocated":
            remedy = f"choose tensor * pipeline * context of trainer.parallel, now {replica}, to divide the GPUs"
        else:
            remedy = f"set {REPLICAS}={AUTO} or {ENGINES}={AUTO}"
        if (fewer := needed.nodes(cluster.gpus_per_node)) < cluster.nodes:
            remedy += f", use {pluralize(fewer, 'node')}"
        size = f"cluster.nodes={cluster.nodes} times cluster.gpus_per_node={cluster.gpus_per_node}"
        idle = f"{gpus - needed.total} of {gpus} GPUs are idle, because the run uses {needed}"
        yield f"{size}: {idle}; {remedy}, or set cluster.allow_idle_gpus=true"


def colocation_problems(config: RunConfig) -> Iterator[str]:
    """Check that there are enough trainer ranks for colocated engines to share devices with."""
    engines, size, ranks = config.rollout.num_engines, config.rollout.ranks, config.trainer.parallel.world_size
    if config.cluster.placement == "colocated" and engines * size > ranks:
        many = f"rollout.num_engines={engines} times tensor * pipeline={size} is more than the {ranks} trainer ranks"
        yield f"cluster.placement=colocated: {many}; use at most {ranks} in all, or placement: separate"


def minibatch_problems(config: RunConfig) -> Iterator[str]:
    """Check that a step has enough samples for its minibatches and replicas."""
    prompts, minibatches = config.rollout.prompts_per_step, config.algorithm.minibatches
    samples, replicas = config.samples_per_row, config.trainer.parallel.data
    if minibatches > prompts:
        problem = f"is more than rollout.prompts_per_step={prompts}; use at most {prompts}"
        yield f"algorithm.minibatches={minibatches} {problem}"
    elif (each := prompts // minibatches * samples) < replicas:
        problem = f"is more than the {each} samples of a minibatch; lower it, or raise rollout.prompts_per_step"
        yield f"trainer.parallel.data={replicas} {problem}"


def stop_token_problems(config: RunConfig, dimensions: ModelDimensions) -> Iterator[str]:
    for token in config.rollout.stop_token_ids:
        if not 0 <= token < dimensions.vocab_size:
            yield f"rollout.stop_token_ids={token} is not a token of the model; use 0 to {dimensions.vocab_size - 1}"


def length_problems(config: RunConfig, dimensions: ModelDimensions) -> Iterator[str]:
    most, longest = dimensions.max_position_embeddings, config.rollout.max_model_len
    prompt, extended = config.data.max_prompt_tokens, _yarn_remedy(dimensions)
    responses = {"rollout": config.rollout.max_new_tokens}
    if config.evaluation.files and config.evaluation.max_new_tokens is not None:
        responses["evaluation"] = config.evaluation.max_new_tokens
    for section, response in responses.items():
        yield from _too_long(prompt, section, response, "rollout.max_model_len", config.max_model_len, ", or raise it")
        yield from _too_long(prompt, section, response, "the model's max_position_embeddings", most, extended)
    if longest is not None and longest > most:
        problem = f"rollout.max_model_len={longest} is more than the model's max_position_embeddings"
        yield f"{problem}; use at most {most}{extended}"


def budget_problems(config: RunConfig) -> Iterator[str]:
    """Check the token budget. Rows of an agent may be as long as the engine's longest sequence."""
    longest, budget = config.max_model_len, config.trainer.target_tokens_per_batch
    if not config.rollout.agent.is_set:
        lengths = config.data.max_prompt_tokens, "rollout", config.rollout.max_new_tokens
        yield from _too_long(*lengths, _BUDGET, budget, ", or raise it")
    elif longest > budget:
        yield f"rollout.max_model_len={longest}, of an agent's history, is more than {_BUDGET}={budget}; lower it"


def _yarn_remedy(dimensions: ModelDimensions) -> str:
    """Return the other remedy for YaRN: engines serve ``max_position_embeddings`` and don't apply the factor to it."""
    scaling = dimensions.rope_scaling or {}
    original = scaling.get("original_max_position_embeddings", 0)
    reach = int(original * scaling.get("factor", 0))
    if scaling.get("rope_type") != "yarn" or reach <= dimensions.max_position_embeddings:
        return ""
    written = f"max_position_embeddings: {reach} and original_max_position_embeddings: {original}"
    return f", or for the whole range of YaRN write {written} to the model's config.json"


def _too_long(prompt: int, section: str, response: int, what: str, limit: int, otherwise: str) -> Iterator[str]:
    if prompt + response > limit:
        both = f"data.max_prompt_tokens={prompt} and {section}.max_new_tokens={response} make {prompt + response}"
        yield f"{both} tokens, more than {what}={limit}; lower them{otherwise}"
