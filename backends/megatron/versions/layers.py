"""Builders of a layer's MLP: a ``ModuleSpec`` in 0.16, a ``functools.partial`` of a class or class method in 0.19."""

import functools
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer

from backends.megatron.installed import IS_NEW, absent, require


def set_experts(layer: Any, module: Any, router: type, experts: type | None) -> None:
    """Build ``module`` with ``router`` and ``experts`` (Megatron's if ``None``) as the layer's mixture of experts."""
    if _built(layer) is not MoELayer:
        raise absent("gpt_layer_specs' MoELayer as the MLP of a layer with experts")
    if IS_NEW:
        submodules = layer.mlp.keywords["submodules"]
        layer.mlp = functools.partial(module, **layer.mlp.keywords)
    else:
        submodules = layer.mlp.submodules
        layer.mlp.module = module
    require(submodules, "router")
    submodules.router = router
    if experts is not None:
        require(submodules, "experts")
        submodules.experts = experts


def _built(layer: Any) -> object:
    """Return the class of the layer's MLP."""
    made: object = layer.mlp.func if IS_NEW else layer.mlp.module
    return getattr(made, "__self__", made)
