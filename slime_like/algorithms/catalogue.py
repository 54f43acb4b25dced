"""Catalogue of the parts that are chosen by name, by kind."""

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from slime_like.algorithms.advantages import ESTIMATORS, AdvantageEstimator
from slime_like.algorithms.gae import gae
from slime_like.algorithms.importance import CORRECTIONS, LEVELS, off_policy_sequence_mask
from slime_like.algorithms.losses.kl import KL_ESTIMATORS
from slime_like.algorithms.losses.policy import POLICY_LOSSES
from slime_like.algorithms.losses.value import value_loss
from slime_like.algorithms.reduction import REDUCTIONS
from slime_like.algorithms.shaping import kl_penalty, overlong_penalty
from slime_like.plugins.resolve import resolve

CATALOGUE: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "loss": POLICY_LOSSES,
        "value loss": MappingProxyType({"value_clip": value_loss}),
        "KL estimator": KL_ESTIMATORS,
        "advantage estimator": ESTIMATORS,
        "advantage estimator with values": MappingProxyType({"gae": gae}),
        "reward term": MappingProxyType({"overlong": overlong_penalty, "kl": kl_penalty}),
        "importance correction": CORRECTIONS,
        "importance level": LEVELS,
        "sequence mask": MappingProxyType({"off_policy": off_policy_sequence_mask}),
        "reduction": REDUCTIONS,
    }
)


def find(kind: str, name: str) -> Any:
    """The object of this kind registered under ``name``, or the one at ``package.module:name``.

    Args:
        kind: a key of ``CATALOGUE``.
        name: a key of that kind's registry, or an import path.

    Returns:
        The function, class or object.

    Raises:
        ValueError: unknown kind or name; the known ones are listed.

    Example:
        >>> find("KL estimator", "k3")
    """
    return resolve(kind, name, resolve("kind of algorithm", kind, CATALOGUE))


def describe(kind: str, name: str) -> str:
    """The formula and its source, as the object's own documentation says them.

    Args:
        kind, name: as in ``find``.

    Returns:
        The text; empty for an object without documentation.

    Raises:
        ValueError: unknown kind or name; the known ones are listed.

    Example:
        >>> print(describe("loss", "gspo"))
    """
    found = find(kind, name)
    return inspect.getdoc(found.compute if isinstance(found, AdvantageEstimator) else found) or ""
