"""Settings of low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685)."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from slime_like.config.base import Section

ALL_LINEAR = "all-linear"

ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's file of an adapter's settings."""

_HARMLESS = {"auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core"}
_HARMLESS |= {"exclude_modules", "peft_version", "qalora_group_size", "revision", "task_type"}
"""PEFT's settings that change neither what an adapter computes nor, as its tensors show, which modules have factors."""
_SUPPORTED = {"peft_type": ("LORA",), "init_lora_weights": (True, False, "gaussian")}
_OFF: tuple[Any, ...] = (None, False, "none", [], {})  # values with which any other setting has no effect


class LoraConfig(Section):
    """Low-rank factors that are trained instead of the weights: y = W x + (alpha / rank) B (A x).

    Every targeted Hugging Face matrix W, (out, in), has its own A, (rank, in), and B, (out, rank). A starts with
    Kaiming's uniform values and B with 0.
    """

    rank: int | None = Field(None, ge=1, description="Rank of every factor; none: train the weights.")
    alpha: float = Field(32.0, gt=0, description="Factor of the product, divided by the rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Share of a factor's inputs that training sets to 0.")
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Modules with factors, by Hugging Face name or its end, such as q_proj. all-linear: all matrices of the layers,
    except routers, gates and gpt-oss's experts. The experts of a layer share names, such as experts.up_proj."""
    sync: Literal["merged", "adapter"] = "merged"
    """merged: engines get whole weights. adapter: engines get only the factors, and apply them."""
    path: Path | None = Field(None, description="PEFT adapter to continue from, which determines rank and targets.")

    @property
    def is_set(self) -> bool:
        """True if factors are trained."""
        return self.rank is not None

    @property
    def sends_factors(self) -> bool:
        """True if engines get only the factors."""
        return self.is_set and self.sync == "adapter"

    @property
    def scale(self) -> float:
        """Factor of the product of B and A."""
        assert self.rank is not None
        return self.alpha / self.rank

    @property
    def base(self) -> str | None:
        """The model that the adapter in ``path`` names as its base."""
        file = None if self.path is None else self.path / ADAPTER_CONFIG
        return None if file is None else json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        """Take what is not given from the adapter. Checks compare what is given. One text may have several targets."""
        if isinstance(data, dict) and isinstance(path := data.get("path"), str | Path):
            data = read_adapter(Path(path).expanduser())[0] | {key: one for key, one in data.items() if one is not None}
        if isinstance(data, dict) and isinstance(names := data.get("targets"), str):
            data = data | {"targets": [name.strip() for name in names.split(",")]}
        return data

    def conflicts(self) -> Iterator[str]:
        if not self.is_set and (changed := self.changed):
            problems = [] if self.path is None else read_adapter(self.path)[1]
            yield from problems or [f"{changed} applies only with factors; set rank, or remove it"]
        if not self.targets or "" in self.targets:
            yield "targets is empty; name modules, or use all-linear"
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            yield f"targets={list(self.targets)}: all-linear includes the others; remove them"


def read_adapter(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return rank, alpha and targets of a PEFT adapter, and problems of the field ``path``, each with a remedy."""
    try:
        raw = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        rank, targets = int(raw.pop("r")), raw.pop("target_modules")
        alpha = raw.pop("lora_alpha") * (math.sqrt(rank) if raw.pop("use_rslora", False) else 1)
        parameters = raw.pop("target_parameters", None) or []
        joined = [name for name in parameters if name.endswith(".gate_up_proj")]  # of two matrices with own factors
        patterns = {"rank_pattern": dict.fromkeys(joined, 2 * rank), "alpha_pattern": dict.fromkeys(joined, 2 * alpha)}
        weights = {name.removesuffix(".weight") for name in parameters if name.endswith(".weight")}
        targets = targets if isinstance(targets, str) else sorted(weights.union(targets))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return {}, [f"path={path}: {ADAPTER_CONFIG} cannot be read ({error!r}); give a directory that PEFT wrote"]
    supported = {key: (*_OFF, one) for key, one in patterns.items()} | _SUPPORTED
    odd = {key: one for key, one in raw.items() if key not in _HARMLESS and one not in supported.get(key, _OFF)}
    if isinstance(targets, str) and targets != ALL_LINEAR:  # a regular expression
        odd["target_modules"] = targets
    found = {"rank": rank, "alpha": alpha, "targets": targets}
    return found, [f"path={path}: {key}={one} is not supported; use another adapter" for key, one in odd.items()]
