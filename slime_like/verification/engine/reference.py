"""Hugging Face's forward pass of a checkpoint, which an engine is compared with."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from slime_like.models.tower import language_names, loading_options
from slime_like.orchestration.rollout.sync_probe import BFLOAT16_BOUND

_BOUNDS = {"float32": 1e-4, "bfloat16": BFLOAT16_BOUND}
_EAGER: Any = {"attn_implementation": "eager", "experts_implementation": "eager"}  # others do not support float64


class Reference:
    """Model of a one-file checkpoint, without batches and caches, in float32, or in float64 if weights are rounded.

    Args:
        dtype: precision of the engine, ``float32`` or ``bfloat16``; weights are rounded to it.

    Attributes:
        weights: weights by name, as a trainer of this precision sends them.
        dtype: precision of the engine.
        bound: upper bound on ``gap`` for a correct engine.
    """

    def __init__(self, directory: Path, dtype: str = "float32") -> None:
        every = load_file(directory / "model.safetensors")
        read = {name: every[name] for name in language_names(directory, every)}
        self.directory = directory
        self.dtype, self.bound = dtype, _BOUNDS[dtype]
        self.weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in read.items()}
        self._options = loading_options(directory)
        self.vocab_size: int = self._options["config"].vocab_size
        self.use({})

    def use(self, weights: Mapping[str, Tensor]) -> None:
        """Replace some or all tensors of ``weights``. transformers loads them, because it stores experts in another way
        than checkpoints do."""
        self.weights = {**self.weights, **weights}
        state = {name: tensor.clone() for name, tensor in self.weights.items()}
        self._model = (
            transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(self._options["config"])]
            .from_pretrained(None, state_dict=state, dtype=self.dtype, **self._options, **_EAGER)
            .to(torch.float32 if self.dtype == "float32" else torch.float64)
        )

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], response: Sequence[int] = ()) -> Tensor:
        """Return logits (len(response) + 1, V) of the tokens after the prompt and after each response token."""
        found: Tensor = self._model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 :]
        return found

    def logprobs(self, prompt: Sequence[int], response: np.ndarray, temperature: float) -> np.ndarray:
        """Return logprobs (len(response),) of temperature-scaled logits; at temperature 0, of unscaled logits."""
        logits = self.logits(prompt, response.tolist())[:-1] / (temperature or 1.0)
        found: np.ndarray = logits.log_softmax(-1).gather(1, torch.from_numpy(response)[:, None])[:, 0].numpy()
        return found

    @torch.no_grad()
    def routes(self, prompt: Sequence[int], response: np.ndarray) -> np.ndarray:
        """Return the experts (tokens - 1, layers with experts, choices) of every token but the last."""
        routers = [module for name, module in self._model.named_modules() if name.endswith(".mlp.gate")]
        chosen: list[Tensor] = []
        hooks = [router.register_forward_hook(lambda _, __, output: chosen.append(output[2])) for router in routers]
        self._model(torch.tensor([[*prompt, *response[:-1]]]))
        for hook in hooks:
            hook.remove()
        return torch.stack(chosen, dim=1).numpy()

    def gap(self, found: np.ndarray, expected: np.ndarray, temperature: float = 1.0) -> float:
        """Return the gap between an engine's logprobs (n,) and the expected ones, relative to expected rounding.

        In float32 it is the largest difference, in nats. In bfloat16, whose largest difference says little, it is the
        median in standard deviations of the vocabulary's logprobs.
        """
        gaps = np.abs(found - expected)
        if np.isnan(gaps).any():
            return np.inf
        if self.dtype == "float32":
            return float(gaps.max()) / max(1.0, 0.5 / (temperature or 1.0))
        spread = float(self.logits(range(3, 35))[0].log_softmax(-1).std())
        return float(np.median(gaps)) * (temperature or 1.0) / spread

    def is_alike(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
        """Return whether pairs of samples are as equal as they should be. In bfloat16, where rounding can select a
        different token and so change all later ones, most pairs must start with the same tokens."""
        if self.dtype == "float32":
            return all(one == other for one, other in pairs)
        return 2 * sum(one[:3] == other[:3] for one, other in pairs) > len(pairs)
