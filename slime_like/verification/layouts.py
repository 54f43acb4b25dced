"""Short names of parallel layouts, such as ``tp2-sp-pp2-cp2-distributed``."""

import re
from dataclasses import dataclass
from typing import Any, get_args

from slime_like.config import ParallelConfig, RunConfig, TrainerConfig
from slime_like.config.trainer import FSDP
from slime_like.errors import ConfigError

ONE_RANK = "single"

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

    def applied_to(self, config: RunConfig) -> RunConfig:
        trainer = config.trainer
        sharded = self.distributed or trainer.backend == FSDP  # FSDP always shards it
        optimizer = trainer.optimizer.model_copy(update={"distributed": sharded, "overlap": self.overlap})
        changes = {"parallel": self.parallel, "optimizer": optimizer, "attention": self.attention or trainer.attention}
        return config.model_copy(update={"trainer": trainer.model_copy(update=changes)})


def parse_layout(name: str) -> Layout:
    """Read a name: ``single``, or parts joined by ``-``.

    Raises:
        ConfigError: a part is unknown or given twice; the message lists the known parts.
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
