"""Hugging Face's forward pass of a checkpoint, and its weights: what an engine is compared with."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor


class Reference:
    """One checkpoint in one file: unbatched, uncached, in float32; in float64 where its weights are rounded.

    Args:
        rounded_to: what its weights are rounded to before that.

    Attributes:
        weights: by name, as a trainer of this precision sends them.
        rounded_to: that precision.
    """

    def __init__(self, directory: Path, rounded_to: torch.dtype = torch.float32) -> None:
        read = load_file(directory / "model.safetensors")
        self.weights = {name: tensor.to(rounded_to) for name, tensor in read.items()}
        self.directory = directory
        self.rounded_to = rounded_to
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
            .from_pretrained(
                None, config=self._config, state_dict=state, dtype=self.rounded_to, attn_implementation="eager"
            )
            .to(torch.float32 if self.rounded_to == torch.float32 else torch.float64)
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
