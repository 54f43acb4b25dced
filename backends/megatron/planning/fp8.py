"""What FP8 products change in an estimate, which is traced in 16 bits (``trainer.fp8``)."""

from collections.abc import Sequence
from dataclasses import replace

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from backends.megatron.head import LogprobModel
from slime_like.config import TrainerConfig
from slime_like.interfaces.estimate import TrainerMemory, Work


def with_fp8_products(
    chunks: Sequence[LogprobModel], trainer: TrainerConfig, tokens: int, memory: TrainerMemory, *passes: Work
) -> tuple[TrainerMemory, Work, Work]:
    """Return one rank's memory and work with the products of its layers in FP8.

    From forward to backward, weights are kept rounded in both directions, one byte each, and inputs take one byte
    instead of two. Attention keeps its output in 16 bits anyway. Kernels that round read two bytes and write two.

    Args:
        tokens: the rank's tokens of a micro-batch, before sequence parallelism.
        passes: forward, and training.
    """
    ends, shards = trainer.fp8_bf16_layers, trainer.parallel.tensor if trainer.parallel.sequence else 1
    weights = inputs = outputs = kept = 0
    for chunk in chunks:
        layers = chunk.decoder.layers
        for place, layer in enumerate(layers):
            if not ends < layer.layer_number <= chunk.config.num_layers - ends:
                continue
            for name, linear in layer.named_modules():
                if not isinstance(linear, ColumnParallelLinear | RowParallelLinear):
                    continue
                out, width = linear.weight.shape
                weights, inputs, outputs = weights + out * width, inputs + tokens * width, outputs + tokens * out
                if place >= trainer.recomputed_layers(len(layers)):
                    rows = tokens // (shards if isinstance(linear, ColumnParallelLinear) else 1)
                    kept += 2 * out * width - (not name.endswith("linear_proj")) * rows * width
    forward, training = passes
    share = min(1.0, 2.0 * tokens * weights / (forward.matmul_flops - forward.head_flops))
    rounding = 4.0 * (weights + inputs)
    peak = memory.activation_bytes + memory.in_flight * kept // len(chunks)
    return (
        replace(memory, activation_bytes=peak, saved_bytes=memory.saved_bytes + kept),
        replace(forward, kernel_bytes=forward.kernel_bytes + rounding, fp8_share=share),
        replace(training, kernel_bytes=training.kernel_bytes + rounding + 4.0 * outputs, fp8_share=share),
    )
