"""Lower bounds on a rank's memory, worked out without tracing it."""

from slime_like.planning.planned_run import PlannedRun, Workload

_FILLED = 0.9
"""The worst micro-batch fills at least so much of its token budget."""


def least_bytes(run: PlannedRun) -> float:
    """Weights, gradients and optimizer state of an even share, and what its products keep: no layout needs less."""
    dimensions, layout = run.dimensions, run.config.trainer.parallel
    experts = 3 * len(dimensions.expert_layers) * dimensions.num_experts * dimensions.hidden_size
    experts *= dimensions.moe_ffn_hidden_size
    shards = layout.tensor * layout.pipeline
    parameters = (dimensions.num_parameters - experts) / shards
    parameters += experts / (layout.pipeline * (layout.expert if layout.expert > 1 else layout.tensor))
    sharded = 0 if run.config.trainer.optimizer.offload else 12 / (layout.context * layout.data)
    return parameters * (2 + 4 + sharded) + least_kept_bytes(run)


def least_kept_bytes(run: PlannedRun) -> float:
    """Less than what the first stage keeps for backward, of all micro-batches under way, in 16 bits: the inputs of
    layers that are recomputed; of others those of matrix products, of attention and of SwiGLU.

    It takes no time to work out; to follow layers without recomputation until they turn out too large takes most.
    """
    config, dimensions = run.config, run.dimensions
    hidden, layout = dimensions.hidden_size, config.trainer.parallel
    heads = dimensions.num_heads * dimensions.value_dim
    of_attention = hidden + 2 * heads + 2 * dimensions.num_kv_heads * dimensions.value_dim
    routed = dimensions.moe_top_k * (hidden + 3 * dimensions.moe_ffn_hidden_size)
    dense = hidden + 3 * dimensions.ffn_hidden_size
    products = [routed] * bool(dimensions.expert_layers)
    products += [dense] * (len(dimensions.expert_layers) < dimensions.num_layers)
    layers = dimensions.num_layers // layout.pipeline
    recomputed = config.trainer.recomputed_layers(layers)
    kept = recomputed * hidden + (layers - recomputed) * (of_attention + min(products))
    under_way = min(Workload.of(config).micro_batches, layout.pipeline)
    tokens = _FILLED * config.trainer.target_tokens_per_batch / (layout.context * layout.tensor)
    return 2 * tokens * kept * under_way
