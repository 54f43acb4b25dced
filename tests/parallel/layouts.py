"""Parallel layouts by name, such as ``tp2-sp-pp2-vpp2-cp2-allgather``, ``single`` or ``fsdp-dp2-recompute``."""

from typing import Any

Settings = dict[str, Any]
"""A layout: sizes in ``trainer.parallel``, the model's "dtype", settings of the optimizer ("overlap", ...) and of
``trainer``."""

_SIZES = {
    "tp": "tensor",
    "pp": "pipeline",
    "vpp": "virtual_pipeline",
    "cp": "context",
    "dp": "data",
    "ep": "expert",
    "recompute": "recompute",  # so many layers
}
_SWITCHES: dict[str, Settings] = {
    "single": {},
    "sp": {"sequence": True},
    "distributed": {"distributed": True},
    "overlap": {"overlap": True, "overlap_bucket_params": 20_000},
    "allgather": {"attention": "allgather"},
    "ring_flash_attn": {"attention": "ring_flash_attn"},
    "recompute": {"recompute": "full"},
    "offload": {"activation_offload": True},
    "host": {"offload": True},
    "tree": {"share_prefixes": "tree"},
    "prompts": {"share_prefixes": "prompts"},
    "fsdp": {"backend": "fsdp"},
    "sharded": {"fsdp": {"accumulate": "sharded"}},
    "kept": {"fsdp": {"reshard_after_forward": False}},
    "bfloat16": {"dtype": "bfloat16"},
}


def layout_of(name: str) -> Settings:
    """Return the settings that the parts of a name give, for ``parity_config``."""
    settings: Settings = {}
    for part in name.split("-"):
        kind = part if part in _SWITCHES else part.rstrip("0123456789")
        settings |= _SWITCHES[part] if kind == part else {_SIZES[kind]: int(part.removeprefix(kind))}
    return settings


def layers_of(layout: str) -> int:
    """Return how many layers a model needs at least, so that the layout treats several of them differently."""
    settings = layout_of(layout)
    divided = settings.get("pipeline", 1) > 2 or "virtual_pipeline" in settings
    return 4 if divided or isinstance(settings.get("recompute"), int) else 2
