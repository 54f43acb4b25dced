"""Tokens and other inputs of a prompt, on the way from its row to its pack."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class PromptInput:
    """Everything that a model receives for a prompt.

    Attributes:
        token_ids: the prompt's ids.
        fields: further arrays by name, each a ``TensorField`` over "prompt" of ``SampledFields``. The prompt of a later
            turn keeps the fields of the first one, which describe its first tokens.
    """

    token_ids: Sequence[int]
    fields: Mapping[str, np.ndarray] = field(default_factory=dict)
