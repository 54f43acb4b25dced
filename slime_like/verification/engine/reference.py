"""Hugging Face's forward pass of a checkpoint, and its weights: what an engine is compared with."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from slime_like.orchestration.rollout.sync_probe import BFLOAT16_BOUND

_BOUNDS = {"float32": 1e-4, "bfloat16": BFLOAT16_BOUND}
_EAGER: Any = {"attn_implementation": "eager", "experts_implementation": "eager"}  # others take no float64


class Reference:
    """One checkpoint in one file: unbatched, uncached, in float32; in float64 where its weights are rounded.

    Args:
        dtype: of the engine, ``float32`` or ``bfloat16``; what its weights are rounded to before that.

    Attributes:
        weights: by name, as a trainer of this precision sends them.
        dtype: that of the engine.
        bound: on ``gap`` of a sound engine.
    """

    def __init__(self, directory: Path, dtype: str = "float32") -> None:
        read = load_file(directory / "model.safetensors")
        self.directory = directory
        self.dtype, self.bound = dtype, _BOUNDS[dtype]
        self.weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in read.items()}
        self._config = transformers.AutoConfig.from_pretrained(directory)
        self.vocab_size: int = self._config.vocab_size
        self.use({})

    def use(self, weights: Mapping[str, Tensor]) -> None:
        """Compute with these weights from now on, of some or all tensors of ``weights``, as transformers loads them:
        it stores experts otherwise than checkpoints do."""
        self.weights = {**self.weights, **weights}
        state = {name: tensor.clone() for name, tensor in self.weights.items()}
        self._model = (
            transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(self._config)]
            .from_pretrained(None, config=self._config, state_dict=state, dtype=self.dtype, **_EAGER)
            .to(torch.float32 if self.dtype == "float32" else torch.float64)
        )

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], response: Sequence[int] = ()) -> Tensor:
        """(len(response) + 1, V): what follows the prompt, and each response token."""
        found: Tensor = self._model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 :]
        return found

    def logprobs(self, prompt: Sequence[int], response: np.ndarray, temperature: float) -> np.ndarray:
        """(len(response),) of the temperature-scaled logits; at temperature 0, of the unscaled ones."""
        logits = self.logits(prompt, response.tolist())[:-1] / (temperature or 1.0)
        found: np.ndarray = logits.log_softmax(-1).gather(1, torch.from_numpy(response)[:, None])[:, 0].numpy()
        return found

    def gap(self, found: np.ndarray, expected: np.ndarray, temperature: float = 1.0) -> float:
        """Distance of an engine's logprobs (n,) from the expected ones, relative to rounding at this temperature: in
        float32 the largest, in nats; in bfloat16, where it says little, the median over the standard deviation of the
        vocabulary's logprobs."""
        gaps = np.abs(found - expected)
        if np.isnan(gaps).any():
            return np.inf
        if self.dtype == "float32":
            return float(gaps.max()) / max(1.0, 0.5 / (temperature or 1.0))
        spread = float(self.logits(range(3, 35))[0].log_softmax(-1).std())
        return float(np.median(gaps)) * (temperature or 1.0) / spread

    def is_alike(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
        """Whether samples that should be equal are. In bfloat16 rounding, which depends on the batch, now and then
        decides for another token, and all that follow it are others: there most pairs begin alike."""
        if self.dtype == "float32":
            return all(one == other for one, other in pairs)
        return 2 * sum(one[:3] == other[:3] for one, other in pairs) > len(pairs)
