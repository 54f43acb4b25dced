"""The installed version of Megatron-core, temporary replacement of its symbols, and differences between versions.

Latent attention: 0.16 builds the spec's modules, 0.19 chooses some itself.
Layers: a layer's MLP is built by a ``ModuleSpec`` in 0.16, by a ``functools.partial`` of a class (method) in 0.19.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from packaging.version import Version

from slime_like.errors import TrainerError

SUPPORTED = ("0.16.1", "0.19.2")
"""Versions that the adaptations support: the newest for Python 3.11, and the newest for 3.12."""

INSTALLED = Version(version("megatron-core"))

IS_NEW = INSTALLED.release >= (0, 19)


def require(owner: Any, name: str) -> None:
    """Raise TrainerError if the installed version does not define the adapted ``owner.name``."""
    if not hasattr(owner, name):
        raise absent(f"{getattr(owner, '__name__', repr(owner))}.{name}")


def absent(spot: str) -> TrainerError:
    """Return the error for an adapted symbol that the installed version lacks."""
    return TrainerError(
        f"{spot} does not exist in megatron-core {INSTALLED}; the adaptations support {' and '.join(SUPPORTED)}",
        code="megatron-version",
        who="cpu_runtime",
        remedy=f"install megatron-core=={SUPPORTED[IS_NEW]}",
    )


@dataclass(frozen=True, slots=True)
class Patch:
    """Replacement of ``owner.name`` by ``value``. ``adds`` marks a name that the library fails to define itself."""

    owner: Any
    name: str
    value: Any
    adds: bool = False


_MISSING = object()


@contextlib.contextmanager
def apply_patches(*patches: Patch) -> Iterator[None]:
    """Apply the patches inside the block.

    Raises:
        TrainerError: the installed Megatron-core does not have a symbol.
    """
    originals = []
    try:
        for patch in patches:
            if not patch.adds:
                require(patch.owner, patch.name)
            # Inherited values are not restored.
            originals.append((patch.owner, patch.name, vars(patch.owner).get(patch.name, _MISSING)))
            setattr(patch.owner, patch.name, patch.value)
        yield
    finally:
        for owner, name, original in reversed(originals):
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


_LATENT_PARTS = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")

if IS_NEW:
    require(MLASelfAttention, "_resolve_qk_norm_config")


# -------------------------------------------------------------------------------------------------------------- layers
class AsSpecified:
    """Mixin that builds the spec's modules in 0.19, too, instead of Transformer Engine's for some query norms."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return {name: getattr(submodules, name) for name in _LATENT_PARTS}


def mlp_built_by(module: Any, mlp: Any) -> Any:
    """Return the specification ``mlp`` of a dense layer's MLP with another ``module``."""
    if IS_NEW:
        return functools.partial(module.as_mlp_submodule, **mlp.keywords)
    mlp.module = module
    return mlp


def set_experts(layer: Any, module: Any, router: type, experts: type | None) -> None:
    """Build ``module`` with ``router`` and ``experts`` (Megatron's if ``None``) as the layer's mixture of experts."""
    built: object = layer.mlp.func if IS_NEW else layer.mlp.module
    if getattr(built, "__self__", built) is not MoELayer:
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
