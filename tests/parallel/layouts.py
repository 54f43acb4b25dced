"""Parallel layouts by name, such as ``tp2-sp-pp2-vpp2-cp2-allgather``, ``single`` or ``fsdp-dp2-recompute``."""

from typing import Any

_SIZES = {
    "tp": "tensor",
    "pp": "pipeline",
    "vpp": "virtual_pipeline",
    "cp": "context",
    "dp": "data",
    "ep": "expert",
    "recompute": "recompute",  # so many layers
}
_SWITCHES: dict[str, dict[str, Any]] = {
    "single": {},
    "sp": {"sequence": True},
    "distributed": {"distributed": True},
    "overlap": {"overlap": True, "overlap_bucket_params": 20_000},
    "allgather": {"attention": "allgather"},
    "ring_flash_attn": {"attention": "ring_flash_attn"},
    "recompute": {"recompute": "full"},
    "offload": {"activation_offload": True},
    "tree": {"share_prefixes": "tree"},
    "fsdp": {"backend": "fsdp"},
}


def layout_of(name: str) -> dict[str, Any]:
    """Return the settings that the parts of a name give, for ``parity_config``."""
    settings: dict[str, Any] = {}
    for part in name.split("-"):
        kind = part.rstrip("0123456789")
        settings |= _SWITCHES[part] if kind == part else {_SIZES[kind]: int(part.removeprefix(kind))}
    return settings
