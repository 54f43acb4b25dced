"""Settings of low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from slime_like.config.base import Section

ALL_LINEAR = "all-linear"


def _names(value: Any) -> Any:
    """Turn one name into a tuple. Otherwise each of its characters would be a name."""
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


class LoraConfig(Section):
    """Low-rank factors that are trained instead of the weights: y = W x + (alpha / rank) B (A x).

    Every targeted Hugging Face matrix W, (out, in), has its own A, (rank, in), and B, (out, rank). A starts with
    Kaiming's uniform values and B with 0.
    """

    rank: int | None = Field(None, ge=1, description="Rank of every factor; none: train the weights.")
    alpha: float = Field(32.0, gt=0, description="Factor of the product, divided by the rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Share of a factor's inputs that training sets to 0.")
    targets: Annotated[tuple[str, ...], BeforeValidator(_names)] = (ALL_LINEAR,)
    """Modules with factors, by Hugging Face name or its end, such as q_proj. all-linear: all matrices of the layers,
    except routers."""
    sync: Literal["merged", "adapter"] = "merged"
    """merged: engines get whole weights. adapter: engines get only the factors, and apply them."""
    path: Path | None = Field(None, description="PEFT adapter to continue from, which determines rank and targets.")

    @property
    def is_set(self) -> bool:
        """Whether factors are trained."""
        return self.rank is not None

    @property
    def scale(self) -> float:
        """Factor of the product of B and A."""
        assert self.rank is not None
        return self.alpha / self.rank

    def conflicts(self) -> Iterator[str]:
        if not self.is_set and (changed := self.changed):
            yield f"{changed} applies only with factors; set rank, or remove it"
        if not self.targets or "" in self.targets:
            yield "targets is empty; name modules, or use all-linear"
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            yield f"targets={list(self.targets)}: all-linear includes the others; remove them"
