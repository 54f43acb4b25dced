"""Short names of parallel layouts, such as ``tp2-sp-pp2-cp2-distributed``, and tolerances for rounding between them."""

import re
from dataclasses import dataclass
from typing import Any, get_args

from slime_like.config import ParallelConfig, RunConfig, TrainerConfig
from slime_like.config.trainer import FSDP
from slime_like.errors import ConfigError
from slime_like.models.dimensions import ModelDimensions

ONE_RANK = "single"


def without_fp8(config: RunConfig) -> RunConfig:
    trainer = config.trainer.model_copy(update={"fp8": "none", "fp8_bf16_layers": 0})
    return config.model_copy(update={"trainer": trainer})


DEFAULT_LAYOUTS = (
    "tp2", "tp2-sp", "pp2", "pp2-vpp2", "cp2", "cp4", "cp2-allgather", "dp2", "dp2-distributed-overlap",
    "tp4-sp", "dp2-ep2", "tp2-sp-ep2", "tp2-cp2-dp2", "tp2-sp-cp2-allgather", "tp2-sp-pp2-cp2-distributed",
)  # fmt: skip
"""Every axis by itself, and combinations of axes that interact."""

_SIZES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "dp": "data", "ep": "expert", "vpp": "virtual_pipeline"}
_SIZE = re.compile(rf"({'|'.join(_SIZES)})([1-9]\d*)")
_ATTENTION = tuple(get_args(TrainerConfig.model_fields["attention"].annotation))
_SWITCHES: dict[str, tuple[str, Any]] = {
    "sp": ("sequence", True),
    **{name: (name, True) for name in ("distributed", "overlap")},
    **{name: ("attention", name) for name in _ATTENTION},
}


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to lay out a model; ``name`` is the user's text.

    Attributes:
        distributed: shard optimizer state over data-parallel ranks.
        overlap: reduce gradients and gather sharded weights during computation.
        attention: value of ``trainer.attention``; ``None`` keeps the configured one.
    """

    name: str
    parallel: ParallelConfig
    distributed: bool = False
    overlap: bool = False
    attention: str | None = None

    def apply_to(self, config: RunConfig) -> RunConfig:
        """Return the configuration with this layout, and without FP8, whose scales differ between layouts."""
        trainer = without_fp8(config).trainer
        sharded = self.distributed or trainer.backend == FSDP  # FSDP always shards it
        optimizer = trainer.optimizer.model_copy(update={"distributed": sharded, "overlap": self.overlap})
        changes = {"parallel": self.parallel, "optimizer": optimizer, "attention": self.attention or trainer.attention}
        return config.model_copy(update={"trainer": trainer.model_copy(update=changes)})


def parse_layout(name: str) -> Layout:
    """Read a name: ``single``, or parts joined by ``-``.

    Raises ``ConfigError`` if a part is unknown or given twice; the message lists the known parts.
    """
    settings: dict[str, Any] = {}
    for part in [] if name == ONE_RANK else name.split("-"):
        if size := _SIZE.fullmatch(part):
            key, value = _SIZES[size[1]], int(size[2])
        elif part in _SWITCHES:
            key, value = _SWITCHES[part]
        else:
            raise ConfigError([f"--layouts {name}: {part!r} is unknown; {_GRAMMAR}"])
        if key in settings:
            raise ConfigError([f"--layouts {name}: {part!r} sets {key} again; keep one of the two"])
        settings[key] = value
    others = {key: settings.pop(key) for key in ("distributed", "overlap", "attention") if key in settings}
    return Layout(name, ParallelConfig(**settings), **others)


_GRAMMAR = (
    f"write {ONE_RANK!r}, or parts joined by '-': tpN, ppN, cpN, dpN, epN (sizes), vppN (model chunks per stage), sp "
    "(sequence parallelism), distributed and overlap (optimizer), and one attention of "
    f"{', '.join(_ATTENTION)}"
)


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Bounds for one precision.

    Attributes:
        logprob_max, logprob_mean: nats, over response tokens.
        loss: difference relative to ``1 + |loss|``.
        grad_norm: relative difference.
        gradient: norm of the deviation of a tensor's gradient, relative to the gradient's norm.
        gradient_floor: additional deviation, relative to the norm of the whole gradient.
        weight_change: norm of a tensor's deviation, relative to the norm of its change in training.
        rounding: additional deviation, relative to the tensor's norm: one unit in the last place.
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
"""Tolerances by ``model.dtype`` if no token is routed. Logprobs of a wrong layout differ by whole nats, and gradients
that were not reduced by tens of percent."""

ROUTED_BFLOAT16 = Tolerances(2.0, 0.05, 1e-2, 5e-2, 0.5, 1e-3, 0.5, 2.0**-8)
"""Tolerances for a mixture of experts in bfloat16. Rounding can change a close choice of experts, so the results
jump. The bounds are two to three times the observed differences between correct layouts of tiny models."""

ROUTED_NOTE = (
    "note: in bfloat16, rounding sends some tokens to other experts, so bounds are wide and small faults pass; "
    "--model.dtype float32, on CPUs, has sharp bounds"
)


def tolerances_of(dtype: str, dimensions: ModelDimensions) -> Tolerances:
    return ROUTED_BFLOAT16 if dimensions.num_experts and dtype == "bfloat16" else TOLERANCES[dtype]


def step_flags(dimensions: ModelDimensions, dtype: str) -> list[str]:
    """Return settings under which AdamW's first steps depend smoothly on the gradient.

    Every gradient is clipped to the same small norm, so the scale of its elements is known. ``eps`` equals their root
    mean square; otherwise an update would be close to their sign, which rounding flips. The ratio's clipping range is
    wide, because a ratio that rounding moves over its edge would make the gradient jump. In bfloat16, weights take one
    larger step, which clearly exceeds their rounding.
    """
    clip = 1e-3
    values = {
        "trainer.optimizer.lr": 1e-3 if dtype == "float32" else 3e-2,
        "trainer.optimizer.clip_grad": clip,
        "trainer.optimizer.eps": clip / dimensions.num_parameters**0.5,
        "trainer.optimizer.weight_decay": 0.1,
        "algorithm.kl.coef": 0.05,
        "algorithm.entropy_coef": 0.01,
        "algorithm.loss.clip_low": 0.99,
        "algorithm.loss.clip_high": 100.0,
    }
    if dimensions.num_experts:
        values["algorithm.moe_aux_loss_coef"] = 0.01
    return [text for name, value in values.items() for text in (f"--{name}", repr(value))]
