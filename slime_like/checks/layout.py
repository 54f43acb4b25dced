"""Which parallel layouts a model admits. Sizes only: no torch, no process group."""

from collections.abc import Iterator

from slime_like.config.run import RunConfig
from slime_like.config.trainer import ParallelConfig
from slime_like.models.dimensions import ModelDimensions


def layout_problems(parallel: ParallelConfig, dimensions: ModelDimensions) -> list[str]:
    """Why this layout cannot run this model: one sentence per fault, with field, value and remedy."""
    return list(_layout_problems(parallel, dimensions))


def trainer_layout_problems(config: RunConfig, dimensions: ModelDimensions) -> Iterator[str]:
    return _layout_problems(config.trainer.parallel, dimensions)


def _layout_problems(parallel: ParallelConfig, dimensions: ModelDimensions) -> Iterator[str]:
    """The first ones need no sizes."""
    chunks = parallel.virtual_pipeline
    if parallel.sequence and parallel.tensor == 1:
        yield "trainer.parallel.sequence=true needs trainer.parallel.tensor above 1; set it to false, or raise tensor"
    if chunks > 1 and parallel.pipeline == 1:
        yield f"trainer.parallel.virtual_pipeline={chunks} needs trainer.parallel.pipeline above 1; set it to 1"
    yield from _tensor_problems(parallel, dimensions)
    yield from _pipeline_problems(parallel, dimensions)
    yield from _expert_problems(parallel, dimensions)


def layers_per_stage(dimensions: ModelDimensions, num_stages: int) -> list[int]:
    """Return the layers of every pipeline stage (or model chunk, if stages hold several), in the model's order.

    The split minimizes the longest stage. The head counts as as many layers as have its matrix products. Middle stages
    take a spare layer before the first one, which also has the embedding.
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


def engine_rank_problems(config: RunConfig, dimensions: ModelDimensions) -> list[str]:
    """vLLM and SGLang give every rank of an engine as many heads; further requirements are checked when they start."""
    rollout = config.rollout
    if rollout.engine not in ("vllm", "sglang") or dimensions.num_heads % rollout.tensor == 0:
        return []
    return [
        f"rollout.tensor={rollout.tensor} does not divide the model's {dimensions.num_heads} attention heads; use "
        f"{either(divisors(dimensions.num_heads))}"
    ]


def _tensor_problems(parallel: ParallelConfig, dimensions: ModelDimensions) -> Iterator[str]:
    what = {"attention heads": dimensions.num_heads, **_split_sizes(parallel, dimensions)}
    groups = dimensions.num_kv_heads
    # Where there are more ranks than KV heads, as many ranks share each; Megatron gathers and cuts them.
    fitting = [
        size
        for size in divisors(dimensions.num_heads)
        if (groups % size == 0 or size % groups == 0) and all(n % size == 0 for n in what.values())
    ]
    wrong = [
        f"trainer.parallel.tensor={parallel.tensor} does not divide the model's {count} {name}; use {either(fitting)}"
        for name, count in what.items()
        if count % parallel.tensor
    ][:1]  # one is enough: the remedy is the same for all
    yield from wrong
    if not wrong and parallel.tensor not in fitting:
        yield (
            f"trainer.parallel.tensor={parallel.tensor} is neither a divisor nor a multiple of the model's {groups} "
            f"KV heads; use {either(fitting)}"
        )


def _split_sizes(parallel: ParallelConfig, dimensions: ModelDimensions) -> dict[str, int]:
    """What else is cut into as many parts as there are tensor-parallel ranks."""
    what = {}
    if dimensions.latent is not None:
        what["columns of compressed keys and values"] = dimensions.latent.kv_rank + dimensions.latent.rope_dim
        if dimensions.latent.query_rank is not None:
            what["columns of compressed queries"] = dimensions.latent.query_rank
    if len(dimensions.expert_layers) < dimensions.num_layers:
        what["FFN columns"] = dimensions.ffn_hidden_size
    if dimensions.num_experts and parallel.expert == 1:  # with expert parallelism every expert is whole
        what["FFN columns of an expert"] = dimensions.moe_ffn_hidden_size
    if dimensions.moe_shared_ffn_hidden_size:
        what["FFN columns of the shared experts"] = dimensions.moe_shared_ffn_hidden_size
    return what


def _pipeline_problems(parallel: ParallelConfig, dimensions: ModelDimensions) -> Iterator[str]:
    layers, chunks = dimensions.num_layers, parallel.virtual_pipeline
    if layers < parallel.pipeline * chunks:
        times = f" times virtual_pipeline={chunks}" if chunks > 1 else ""
        yield (
            f"trainer.parallel.pipeline={parallel.pipeline}{times} is more than the model's {layers} layers; "
            f"every stage needs one, so use at most {layers}" + (" in all" if chunks > 1 else "")
        )


def _expert_problems(parallel: ParallelConfig, dimensions: ModelDimensions) -> Iterator[str]:
    experts = dimensions.num_experts
    if experts == 0:
        if parallel.expert > 1:
            yield f"trainer.parallel.expert={parallel.expert}, but the model has no experts; set it to 1"
        return
    if experts % parallel.expert:
        yield (
            f"trainer.parallel.expert={parallel.expert} does not divide the model's {experts} experts; "
            f"use {either(divisors(experts))}"
        )
    ranks = parallel.tensor * parallel.context * parallel.data
    if parallel.expert > 1 and ranks % parallel.expert:
        yield (
            f"trainer.parallel.expert={parallel.expert} does not divide tensor * context * data = {ranks}; "
            f"use {either(divisors(ranks))}"
        )
    if parallel.tensor > 1 and not parallel.sequence:
        yield (
            f"trainer.parallel.tensor={parallel.tensor} on a mixture of experts needs sequence parallelism; "
            "set trainer.parallel.sequence=true"
        )


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def either(sizes: list[int]) -> str:
    return " or ".join(part for part in (", ".join(map(str, sizes[:-1])), str(sizes[-1])) if part)
