"""Names and shapes of an adapter's tensors, which are the same for trainers, engines, plans and PEFT directories.

PEFT 0.21 has one pair of factors for a stack of E experts, where k is 2 for a stack of gate and up projections, else 1:
A (E k r, in), entry by entry, and B (k out, k r E). B is block-diagonal, with the experts on its last axis.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

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
_ROUTER = re.compile(r".*\.(gate|router|shared_expert_gate)(\.\w+)?")
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<module>\w+)")
_FACTOR = re.compile(_EXPERT.pattern + r"\.(?P<factor>lora_[AB]\.weight)")
_JOINED = {"gate_proj": 0, "up_proj": 1}

Shape = tuple[int, ...]


def is_target(settings: LoraConfig, name: str, shape: Shape) -> bool:
    """Return whether the Hugging Face tensor is a matrix with factors. All experts of a layer have the same name."""
    module = module_of(name)
    if len(shape) != 2 or not _LAYERS.match(module) or not name.endswith(_WEIGHT) or _ROUTER.fullmatch(module):
        return False
    return ALL_LINEAR in settings.targets or any(f".{module}".endswith(f".{target}") for target in settings.targets)


def module_of(weight: str) -> str:
    """Return the name of a matrix's module in the language model, the same for all experts of a layer."""
    return without_number((own_name(weight) or weight).removesuffix(_WEIGHT))


def without_number(module: str) -> str:
    """Remove the expert's number from a module's name, so all experts of a layer have the same one."""
    return _EXPERT.sub(r"\g<experts>.\g<module>", module)


def factor_names(weight: str) -> tuple[str, str]:
    """Return PEFT's names of A and B in an adapter of the language model, given the matrix's Hugging Face name."""
    module = PREFIX + (own_name(weight) or weight).removesuffix(_WEIGHT)
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def with_tower(factor: str) -> str:
    """Return PEFT's name of the factor in an adapter of a whole model, including its tower."""
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


class FactorPart(NamedTuple):
    """One expert's factor, as entry ``place`` of PEFT's tensor ``stack`` of this shape, viewed as ``blocks``."""

    stack: str
    shape: Shape
    blocks: Shape
    place: tuple[Any, ...]


def factor_parts(factors: Mapping[str, Shape]) -> dict[str, FactorPart]:
    """Return where PEFT has the factors of experts, by their names here.

    Its module is a wrapper for each stack of a layer. The outer one has the down projections, if these have factors.
    """
    found = [match for match in map(_FACTOR.fullmatch, factors) if match]
    experts = Counter(match.expand(r"\g<experts>.\g<module>.\g<factor>") for match in found)
    parts = {}
    for match in found:
        count, expert, (first, last) = experts[without_number(match[0])], int(match["number"]), factors[match[0]]
        kind, kinds = _JOINED.get(match["module"], 0), 1 + (match["module"] in _JOINED)
        inner = "base_layer." if kinds > 1 and f"{match['experts']}.down_proj.{match['factor']}" in experts else ""
        is_a = "lora_A" in match["factor"]
        shape = (count * kinds * first, last) if is_a else (kinds * first, kinds * last * count)
        blocks: Shape = (count, kinds, first, last) if is_a else (kinds, first, kinds, last, count)
        place = (expert, kind) if is_a else (kind, slice(None), kind, slice(None), expert)
        parts[match[0]] = FactorPart(f"{match['experts']}.{inner}{match['factor']}", shape, blocks, place)
    return parts


def stored_factors(expected: Mapping[str, Shape], found: Collection[str]) -> dict[str, Shape]:
    """Return name and shape of the factors in a file with the tensors ``found``, which may have experts in stacks."""
    parts = {name: part for name, part in factor_parts(expected).items() if part.stack in found}
    plain = {name: shape for name, shape in expected.items() if name not in parts}
    return plain | {part.stack: part.shape for part in parts.values()}


def module_ends(factors: Iterable[str]) -> list[str]:
    """Return the last names of the modules that have these factors, such as q_proj."""
    return sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in factors})


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
