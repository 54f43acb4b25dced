"""Names and shapes of an adapter's tensors, which are the same for trainers, engines, plans and PEFT directories."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from slime_like.config.lora import ALL_LINEAR, LoraConfig
from slime_like.config.sections import ModelConfig
from slime_like.models.tower import own_name
from slime_like.models.weight_files import fingerprint

ADAPTER = "adapter"
"""Name of an adapter in manifests (``Manifest.updates``)."""

ADAPTER_FILE = "adapter_model.safetensors"
"""PEFT's file of an adapter's tensors."""

PREFIX = "base_model.model."
"""PEFT's prefix of module names."""

_WEIGHT, _INNER = ".weight", "model.language_model."
_LAYERS = re.compile(r"(model|gpt_neox|transformer)\.(layers|h)\.")
_ROUTERS = (".mlp.gate.weight", ".mlp.shared_expert_gate.weight")

Shape = tuple[int, ...]


def is_target(settings: LoraConfig, name: str, shape: Shape) -> bool:
    """Return whether the Hugging Face tensor is a matrix with factors."""
    name = own_name(name) or name
    if len(shape) != 2 or not _LAYERS.match(name) or not name.endswith(_WEIGHT) or name.endswith(_ROUTERS):
        return False
    module = name.removesuffix(_WEIGHT)
    return ALL_LINEAR in settings.targets or any(f".{module}".endswith(f".{target}") for target in settings.targets)


def factor_names(weight: str) -> tuple[str, str]:
    """Return PEFT's names of A and B in an adapter of the language model, given the matrix's Hugging Face name."""
    module = PREFIX + (own_name(weight) or weight).removesuffix(_WEIGHT)
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def with_tower(factor: str) -> str:
    """Return the factor's name in an adapter of a whole model with a tower, as PEFT has it."""
    return factor.replace(f"{PREFIX}model.", f"{PREFIX}{_INNER}")


def without_tower(factor: str) -> str:
    """Return the factor's name by ``factor_names``, given PEFT's in either kind of adapter or in a training state."""
    return factor.replace(".default.", ".").replace(f"{PREFIX}{_INNER}", f"{PREFIX}model.")


def factor_shapes(settings: LoraConfig, weights: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return name and shape of every factor, A (rank, in) and B (out, rank).

    Args:
        weights: name and shape of every Hugging Face tensor of the model.
    """
    rank, found = settings.rank or 0, dict[str, Shape]()
    for name, shape in weights.items():
        if is_target(settings, name, shape):
            a, b = factor_names(name)
            found |= {a: (rank, shape[1]), b: (shape[0], rank)}
    return found


def module_ends(factors: Iterable[str]) -> list[str]:
    """Return the last names of the modules that have these factors, such as q_proj."""
    return sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in factors})


def unmatched_targets(settings: LoraConfig, weights: Iterable[tuple[str, Shape]]) -> list[str]:
    """Return the targets that name no matrix of the model."""
    known = list(weights)
    alone = {target: settings.model_copy(update={"targets": (target,)}) for target in settings.targets}
    return [target for target, one in alone.items() if not any(is_target(one, *each) for each in known)]


def adapter_facts(model: ModelConfig) -> dict[str, Any]:
    """Return what a checkpoint of factors must agree with, as JSON values; nothing without factors."""
    lora = model.lora
    if not lora.is_set:
        return {}
    return {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets), "base": fingerprint(model.path)}


def facts_problem(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return how the facts of a checkpoint and of a run differ, with the remedy, or ``None``."""
    keys = [key for key in {**saved, **now} if saved.get(key) != now.get(key)]
    if not keys or (keys == ["base"] and None in (saved["base"], now["base"])):  # its files cannot be read here
        return None
    differing = ", ".join(f"{key} {saved.get(key, 'none')} (now {now.get(key, 'none')})" for key in keys)
    return f"was trained with other factors, or on another model: {differing}; use its model.lora and model.path"
