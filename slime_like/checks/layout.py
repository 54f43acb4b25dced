"""Checks of sizes: a model's architecture, a parallel layout, GPUs, minibatches, and lengths of sequences.

Needs neither torch nor a process group.
"""

from collections.abc import Iterator
from pathlib import Path

from slime_like.config.filling import AUTO, ENGINES, REPLICAS, gpus_needed
from slime_like.config.run import RunConfig
from slime_like.config.trainer import ParallelConfig, TrainerConfig
from slime_like.models.dimensions import FAMILIES, ModelDimensions
from slime_like.system.words import pluralize


def layout_problems(parallel: ParallelConfig, dimensions: ModelDimensions) -> list[str]:
    """Return why this layout cannot run this model, one sentence per problem."""
    parts = (_tensor_problems, _linear_problems, _pipeline_problems, _expert_problems)
    return [problem for part in parts for problem in part(parallel, dimensions)]


def layers_per_stage(dimensions: ModelDimensions, num_stages: int) -> list[int]:
    """Return the layers of every pipeline stage (or model chunk, if stages hold several), in the model's order.

    The split minimizes the longest stage. The head counts as the number of layers with as many matrix products. A spare
    layer goes to a middle stage before it goes to the first stage, which also has the embedding.
    """
    head = dimensions.vocab_size * dimensions.hidden_size
    costs = [1.0] * num_stages
    costs[-1] += head * dimensions.num_layers / (dimensions.active_parameters - head)
    layers = [1] * num_stages
    order = [*range(1, num_stages - 1), 0, num_stages - 1]
    for _ in range(dimensions.num_layers - num_stages):
        stage = min(order, key=costs.__getitem__)
        layers[stage] += 1
        costs[stage] += 1.0
    return layers


def _tensor_problems(parallel: ParallelConfig, dimensions: ModelDimensions) -> Iterator[str]:
    if parallel.sequence and parallel.tensor == 1:
        yield "trainer.parallel.sequence=true needs trainer.parallel.tensor above 1; set it to false, or raise tensor"
    what = {"attention heads": dimensions.num_heads, **_split_sizes(parallel, dimensions)}
    groups = dimensions.num_kv_heads
    # If there are more ranks than KV heads, ranks share them evenly; Megatron gathers and splits them.
    fitting = [
        size
        for size in divisors(dimensions.num_heads)
        if (groups % size == 0 or size % groups == 0) and all(n % size == 0 for n in what.values())
    ]
    wrong = [
        f"trainer.parallel.tensor={parallel.tensor} does not divide the model's {count} {name}; use {either(fitting)}"
        for name, count in what.items()
        if count % parallel.tensor
    ][:1]  # the remedy is the same for all
    yield from wrong
    if not wrong and parallel.tensor not in fitting:
        problem = f"neither divides the model's {groups} KV heads nor is a multiple of them"
        yield f"trainer.parallel.tensor={parallel.tensor} {problem}; use {either(fitting)}"


def _linear_problems(parallel: ParallelConfig, dimensions: ModelDimensions) -> Iterator[str]:
    linear = dimensions.attention.linear
    if linear is not None and linear.num_key_heads % (parallel.tensor * parallel.context):
        axis, other = ("context", "tensor") if parallel.context > 1 else ("tensor", "context")
        heads = linear.num_key_heads
        fitting = [size for size in divisors(heads) if heads % (size * getattr(parallel, other)) == 0] or [1]
        problem = f"tensor * context does not divide the {heads} key heads of linear attention"
        yield f"trainer.parallel.{axis}={getattr(parallel, axis)}: {problem}; use {either(fitting)}"


def _split_sizes(parallel: ParallelConfig, dimensions: ModelDimensions) -> dict[str, int]:
    """Return further sizes that are split over the tensor-parallel ranks."""
    what = dimensions.attention.split_columns(dimensions)
    if len(dimensions.expert_layers) < dimensions.num_layers:
        what["FFN columns"] = dimensions.ffn_hidden_size
    if dimensions.num_experts and parallel.expert == 1:  # expert parallelism does not split experts
        what["FFN columns of an expert"] = dimensions.moe_ffn_hidden_size
    if dimensions.moe_shared_ffn_hidden_size:
        what["FFN columns of the shared experts"] = dimensions.moe_shared_ffn_hidden_size
    return what


def _pipeline_problems(parallel: ParallelConfig, dimensions: ModelDimensions) -> Iterator[str]:
    layers, chunks = dimensions.num_layers, parallel.virtual_pipeline
    if chunks > 1 and parallel.pipeline == 1:
        yield f"trainer.parallel.virtual_pipeline={chunks} needs trainer.parallel.pipeline above 1; set it to 1"
    if layers < parallel.pipeline * chunks:
        times, in_all = (f" times virtual_pipeline={chunks}", " in all") if chunks > 1 else ("", "")
        problem = f"is more than the model's {layers} layers; use at most {layers}{in_all}"
        yield f"trainer.parallel.pipeline={parallel.pipeline}{times} {problem}"


def _expert_problems(parallel: ParallelConfig, dimensions: ModelDimensions) -> Iterator[str]:
    experts = dimensions.num_experts
    if experts == 0:
        if parallel.expert > 1:
            yield f"trainer.parallel.expert={parallel.expert}, but the model has no experts; set it to 1"
        return
    ranks = parallel.tensor * parallel.context * parallel.data
    for count, what in (experts, f"the model's {experts} experts"), (ranks, f"tensor * context * data = {ranks}"):
        if count % parallel.expert:
            yield f"trainer.parallel.expert={parallel.expert} does not divide {what}; use {either(divisors(count))}"
    if dimensions.moe_bias and parallel.tensor > 1 and parallel.expert == 1:
        yield "trainer.parallel.expert=1: tensor ranks do not split experts with biases; use at least 2, or tensor=1"
    if parallel.tensor > 1 and not parallel.sequence:
        yield f"trainer.parallel.tensor={parallel.tensor} with experts needs trainer.parallel.sequence=true; set it"


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def either(sizes: list[int]) -> str:
    return " or ".join(part for part in (", ".join(map(str, sizes[:-1])), str(sizes[-1])) if part)


def family_problems(config: RunConfig, dimensions: ModelDimensions) -> Iterator[str]:
    """Yield why the configured trainer cannot train this model, each with the remedy.

    The trainer checks transformers' modules when it starts.
    """
    coefficient, replay = config.algorithm.moe_aux_loss_coef, config.algorithm.routing_replay
    rate = config.trainer.router_bias_rate
    if coefficient > 0 and dimensions.num_experts == 0:
        yield f"algorithm.moe_aux_loss_coef={coefficient:g}, but the model has no experts to balance; set it to 0"
    if replay != "none" and (dimensions.num_experts == 0 or dimensions.attention.unsupported):
        yield f"algorithm.routing_replay={replay}, but {config.model.path} has no experts of a known family; use none"
    if rate > 0 and not dimensions.moe_sigmoid:
        yield f"trainer.router_bias_rate={rate:g}, but the model has no sigmoid routers of a known family; use 0"
    if (special := dimensions.attention.special) and config.trainer.attention == "transformer_engine":
        yield f"trainer.attention=transformer_engine is not supported for {special}; use auto"
    if config.trainer.fp8 != "none":
        yield from _fp8_problems(config.trainer, dimensions)
    if config.trainer.share_prefixes and dimensions.attention.linear is not None:
        problem = "a sequence's state of linear attention cannot branch; set it to false"
        yield f"trainer.share_prefixes={config.trainer.share_prefixes}: {problem}"
    window = dimensions.attention.window
    slides = window is not None and (config.supervised or config.max_model_len > window)
    yield from _window_problems(config.trainer, config.model.path, dimensions, slides)
    if config.trainer.backend == "megatron":
        reason = dimensions.attention.unsupported
        if reason is None and not FAMILIES[dimensions.family].megatron:
            reason = f"{config.model.path} is a model of type {dimensions.family}"
        if dimensions.capped_logits:
            reason = f"{config.model.path} caps its logits (final_logit_softcapping)"
        if reason is not None:
            yield f"{reason}, which trainer.backend=megatron does not support; use trainer.backend=fsdp"
        return
    if dimensions.attention.unsupported is None:
        return
    reach, longest = dimensions.attention.reach, config.max_model_len
    if reach is not None and not config.supervised and longest > reach:
        yield (
            f"data.max_prompt_tokens and rollout.max_new_tokens allow {longest} tokens, but layers attend to chunks of "
            f"{reach} (attention_chunk_size in the model's config.json); lower the two to {reach} tokens in all"
        )
    if coefficient > 0:
        yield f"algorithm.moe_aux_loss_coef={coefficient:g} does not support {config.model.path}; set it to 0"


def _fp8_problems(trainer: TrainerConfig, dimensions: ModelDimensions) -> Iterator[str]:
    """Yield why Transformer Engine cannot compute this model's products in FP8."""
    setting, parallel, kept = f"trainer.fp8={trainer.fp8}", trainer.parallel, trainer.fp8_bf16_layers
    if special := dimensions.attention.special:
        yield f"{setting} needs Transformer Engine's layers, which do not support {special}; use none"
        return
    sizes = {"hidden units": dimensions.hidden_size, "elements of a head": dimensions.head_dim}
    sizes["FFN columns of an expert"] = dimensions.moe_ffn_hidden_size if dimensions.num_experts else 0
    split = _split_sizes(parallel, dimensions).items()
    for name, size in [
        *sizes.items(),
        *((f"{name} of a tensor rank", size // parallel.tensor) for name, size in split),
    ]:
        if size % 16:
            yield f"{setting} needs sizes that are multiples of 16, but there are {size} {name}; use none"
    if kept and (most := min(dimensions.num_layers // 2, dimensions.num_layers // parallel.pipeline)) < kept:
        yield f"trainer.fp8_bf16_layers={kept} does not fit the layers of the first and last stage; use at most {most}"


def _window_problems(trainer: TrainerConfig, path: Path, dimensions: ModelDimensions, slides: bool) -> Iterator[str]:
    """Yield conflicts with sinks, and with windows if sequences may be longer (``slides``)."""
    window = dimensions.attention.window
    if slides and trainer.share_prefixes:
        problem = f"{path} has a sliding window of {window} tokens; set it to false"
        yield f"trainer.share_prefixes={trainer.share_prefixes}: {problem}"
    context, attention = trainer.parallel.context, trainer.attention
    has_sinks = dimensions.attention.sinks and attention == "ring_flash_attn"
    if context > 1 and (has_sinks or (slides and attention in ("ring", "ring_flash_attn"))):
        what = "attention sinks" if has_sinks else f"a sliding window of {window} tokens"
        yield f"trainer.attention={attention} does not support {what} over {context} context ranks; use auto"


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
