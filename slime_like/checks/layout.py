"""Checks of a parallel layout against a model's sizes. Needs neither torch nor a process group."""

from collections.abc import Iterator

from slime_like.config.rollout import RolloutConfig
from slime_like.config.trainer import ParallelConfig
from slime_like.models.dimensions import ModelDimensions


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


def engine_rank_problems(rollout: RolloutConfig, dimensions: ModelDimensions) -> list[str]:
    """Check that all ranks of a vLLM or SGLang engine get the same number of heads. The engine checks the rest."""
    found: list[str] = []
    if rollout.engine in ("vllm", "sglang") and dimensions.num_heads % rollout.tensor:
        found.append(
            f"rollout.tensor={rollout.tensor} does not divide the model's {dimensions.num_heads} attention heads; use "
            f"{either(divisors(dimensions.num_heads))}"
        )
    if rollout.pipeline > dimensions.num_layers:
        most = dimensions.num_layers
        found.append(f"rollout.pipeline={rollout.pipeline} is more than the model's {most} layers; use at most {most}")
    return found


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
        yield (
            f"trainer.parallel.tensor={parallel.tensor} is neither a divisor nor a multiple of the model's {groups} "
            f"KV heads; use {either(fitting)}"
        )


def _linear_problems(parallel: ParallelConfig, dimensions: ModelDimensions) -> Iterator[str]:
    linear = dimensions.attention.linear
    if linear is not None and linear.num_key_heads % (parallel.tensor * parallel.context):
        axis, other = ("context", "tensor") if parallel.context > 1 else ("tensor", "context")
        heads = linear.num_key_heads
        fitting = [size for size in divisors(heads) if heads % (size * getattr(parallel, other)) == 0] or [1]
        yield (
            f"trainer.parallel.{axis}={getattr(parallel, axis)}: tensor * context ranks, which share the heads of "
            f"linear attention, do not divide the model's {heads} key heads; use {either(fitting)}"
        )


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
    if dimensions.moe_bias and parallel.tensor > 1 and parallel.expert == 1:
        yield (
            "trainer.parallel.expert=1: tensor ranks do not split experts with biases; use at least 2, or "
            "trainer.parallel.tensor=1"
        )
    if parallel.tensor > 1 and not parallel.sequence:
        yield (
            f"trainer.parallel.tensor={parallel.tensor} needs sequence parallelism with a mixture of experts; set "
            "trainer.parallel.sequence=true"
        )


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def either(sizes: list[int]) -> str:
    return " or ".join(part for part in (", ".join(map(str, sizes[:-1])), str(sizes[-1])) if part)
