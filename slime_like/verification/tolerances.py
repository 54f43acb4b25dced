"""Tolerances of layouts for rounding, and an optimizer step in which a difference shows."""

from dataclasses import dataclass

from slime_like.models.dimensions import ModelDimensions


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Bounds for one precision.

    Attributes:
        logprob_max, logprob_mean: nats, over response tokens.
        loss: difference relative to ``1 + |loss|``.
        grad_norm: relative.
        gradient: norm of the deviation of a tensor's gradient, relative to its norm.
        gradient_floor: further deviation allowed, relative to the norm of the whole gradient.
        weight_change: norm of a tensor's deviation, relative to the norm of the change that training made to it.
        rounding: further deviation allowed, relative to the norm of the tensor itself: one unit in the last place.
    """

    logprob_max: float
    logprob_mean: float
    loss: float
    grad_norm: float
    gradient: float
    gradient_floor: float
    weight_change: float
    rounding: float


TOLERANCES = {
    "float32": Tolerances(1e-4, 1e-5, 1e-5, 1e-4, 1e-4, 1e-7, 2e-3, 2.0**-23),
    "bfloat16": Tolerances(0.5, 0.02, 1e-2, 5e-2, 0.1, 1e-3, 0.15, 2.0**-8),
}
"""By ``model.dtype``, where every token goes the same way. Logprobs of a wrong layout differ by whole nats, gradients
that were not reduced by tens of percent."""

ROUTED_BFLOAT16 = Tolerances(2.0, 0.05, 1e-2, 5e-2, 0.5, 1e-3, 0.5, 2.0**-8)
"""Of a mixture of experts in bfloat16: rounding sends a token whose choice of experts was close to others, and what it
computes changes by a jump. Two to three times what sound layouts of tiny models were seen to differ by."""

ROUTED_NOTE = (
    "note: in bfloat16 rounding sends some tokens to other experts, so that bounds are wide and small faults pass; "
    "--model.dtype float32, on CPUs, has sharp ones"
)


def tolerances_of(dtype: str, dimensions: ModelDimensions) -> Tolerances:
    """Return the tolerances of a model in ``dtype``."""
    return ROUTED_BFLOAT16 if dimensions.num_experts and dtype == "bfloat16" else TOLERANCES[dtype]


def step_flags(dimensions: ModelDimensions, dtype: str) -> list[str]:
    """Settings under which AdamW's first steps depend smoothly on the gradient.

    Clipping to a norm that every gradient exceeds makes their scale known; ``eps`` at the root mean square of the
    clipped elements then keeps the update from being their mere sign, which rounding would flip. The clipped ratio of
    the policy loss is opened wide, since a ratio that rounding moves over the edge would change the gradient by a jump.
    In bfloat16 weights take one larger step, which stands clear of their rounding.
    """
    clip = 1e-3
    values = {
        "trainer.optimizer.lr": 1e-3 if dtype == "float32" else 3e-2,
        "trainer.optimizer.clip_grad": clip,
        "trainer.optimizer.eps": clip / parameter_count(dimensions) ** 0.5,
        "trainer.optimizer.weight_decay": 0.1,
        "algorithm.kl_coef": 0.05,
        "algorithm.entropy_coef": 0.01,
        "algorithm.clip_low": 0.99,
        "algorithm.clip_high": 100.0,
    }
    if dimensions.num_experts:
        values["algorithm.moe_aux_loss_coef"] = 0.01
    return [text for name, value in values.items() for text in (f"--{name}", repr(value))]


def parameter_count(dimensions: ModelDimensions) -> int:
    """Elements of all matrices."""
    d = dimensions
    embeddings = d.vocab_size * d.hidden_size * (1 if d.tied_embeddings else 2)
    return embeddings + d.num_layers * d.attention_parameters + d.mlp_parameters(d.num_experts)
