"""The installed version of Megatron-core, temporary replacement of its symbols, and differences between versions.

Latent attention: 0.16 builds the spec's modules, 0.19 chooses some itself.
Layers: a layer's MLP is built by a ``ModuleSpec`` in 0.16, by a ``functools.partial`` of a class (method) in 0.19.
Loading: 0.16 reads with torch's collective ``load_state_dict``, which raises any rank's error on every rank. 0.19 lets
every rank read independently, so one that finds damage would leave the others waiting in their next collective.
Saving: 0.16 writes plain values (``common.pt``) with a separate strategy. 0.19 would store them as another object of
the sharded state, but reads ``common.pt`` if it exists. Written the old way, either version reads the other's files.
"""

import contextlib
import functools
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from packaging.version import Version
from torch.distributed import checkpoint
from torch.distributed.checkpoint import StorageReader

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


SaveCommon = Callable[[dict[str, Any], "str | Path"], None]
"""Writer of plain values into a checkpoint's directory."""

ASYNC_OPTIONS: dict[str, Any] = {"async_strategy": "mcore"} if IS_NEW else {}
"""Options of ``dist_checkpointing.save``: don't use the package that 0.19 prefers."""

_COMMON = "common_state"
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


# --------------------------------------------------------------------------------------------------------- checkpoints
@contextlib.contextmanager
def loading_together(reader: Callable[[Path], StorageReader]) -> Iterator[None]:
    """Inside, ``dist_checkpointing.load`` is collective and reads the directory with ``reader``."""
    patches = [Patch(torch_strategy, "_get_filesystem_reader", lambda path, **_: reader(path))]
    if IS_NEW:
        patches.append(Patch(torch_strategy, "checkpoint", SimpleNamespace(load=_load)))
    with apply_patches(*patches):
        yield


def _load(state: dict[str, Any], reader: StorageReader, *, planner: Any, no_dist: bool) -> None:
    checkpoint.load(state, storage_reader=reader, planner=planner)


@contextlib.contextmanager
def saving_in_process(save_common: SaveCommon) -> Iterator[None]:
    """Inside, pass results through a queue of this process, not of a manager process that Megatron would spawn.

    ``save`` has no argument for the strategy of plain values.
    """
    name = "get_write_results_queue" if IS_NEW else "_get_write_results_queue"
    patches = [Patch(filesystem_async, name, queue.Queue)]
    if not IS_NEW:
        strategy = _common_strategy(save_common)
        patches.append(Patch(serialization, "get_default_save_common_strategy", lambda: strategy))
    with apply_patches(*patches):
        yield


def _common_strategy(save_common: SaveCommon) -> Any:
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy

    class CommonSave(TorchCommonSaveStrategy):
        def save_common(self, common_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
            save_common(common_state_dict, checkpoint_dir)

    return CommonSave("torch", 1)


class PlainValues:
    """Mixin of a strategy for sharded state: removes the plain values if Megatron added them to the state."""

    save_common: SaveCommon

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path, *strategy: Any) -> Any:
        """Run like Megatron's."""
        if IS_NEW:
            if _COMMON not in sharded_state_dict:
                raise absent(f"serialization.save's {_COMMON!r}")
            self.save_common(sharded_state_dict.pop(_COMMON).data, checkpoint_dir)
        return super().async_save(sharded_state_dict, checkpoint_dir, *strategy)  # type: ignore[misc]
