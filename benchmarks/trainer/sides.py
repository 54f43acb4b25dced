"""The measured sides: trainer backends, and Hugging Face's model trained without this project."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.trainer.batch import PaddedBatch, padded_batches
from slime_like.algorithms import real_tokens, unpack_sequences
from slime_like.algorithms.packing.pack import response_logit_index
from slime_like.config import RunConfig
from slime_like.interfaces import RankPlacement, load_backend
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory

_HEAD_CHUNK = 1024


class Side(Protocol):
    """One rank that trains on packs, with its weights on ``device``.

    All minimize the sum over response tokens of -advantage * pi / pi_old, divided by the step's response tokens, and
    keep main weights and AdamW's moments in float32.
    """

    device: torch.device

    def score(self) -> None:
        """Compute logprobs of the step's responses without gradient."""

    def forward_backward(self) -> None:
        """Run forward and backward on all micro-batches of the step."""

    def update(self) -> float:
        """Clip, update with AdamW, and return the gradient norm before clipping."""

    def close(self) -> None:
        """Free all resources."""


class BackendSide:
    """One rank of this project's trainer backends, in the device's precision."""

    def __init__(self, backend: str, config: RunConfig, packs: Sequence[PackedTrajectory]) -> None:
        self._packs = list(packs)
        self._denominator = _response_tokens(packs)
        self.trainer = load_backend(backend)(config, RankPlacement(0, 1, 0, "127.0.0.1", free_port()))
        self.trainer.setup()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def score(self) -> None:
        self.trainer.score(self._packs)

    def forward_backward(self) -> None:
        for pack in self._packs:
            pack.old_logprobs = None  # on-policy: uses the forward pass's own
        self.trainer.begin_step(self._denominator, real_tokens(self._packs))
        self.trainer.accumulate(self._packs, last=True)

    def update(self) -> float:
        stats = self.trainer.finish_step(self._denominator)
        assert stats is not None  # the only rank has the statistics
        return float(stats.grad_norm)

    def close(self) -> None:
        self.trainer.shutdown()


class HuggingFaceSide:
    """Hugging Face's model with torch's attention (``sdpa``), gradients in the model's precision, torch's fused AdamW.

    The head computes only response tokens, in chunks that backward recomputes: whole logits would not fit with the
    larger models.

    Args:
        padded: train on rows of padded sequences, whose causal attention needs no mask; otherwise on the packs, for
            which transformers makes a mask from the positions.
        budget: tokens of a padded micro-batch, including padding.
        recompute: recompute layers in backward.
    """

    def __init__(
        self,
        model: Path,
        dtype: torch.dtype,
        packs: Sequence[PackedTrajectory],
        *,
        padded: bool,
        budget: int,
        recompute: bool,
    ) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        logging.disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa")
        self._model.to(self.device).train()
        if recompute:
            self._model.gradient_checkpointing_enable()
        self._weights = list(self._model.parameters())
        self._main = [p if p.dtype == torch.float32 else p.detach().float() for p in self._weights]
        self._optimizer = torch.optim.AdamW(self._main, lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self._denominator = _response_tokens(packs)
        self._batches: Sequence[PackedTrajectory | PaddedBatch] = packs
        if padded:
            sequences = [sequence for pack in packs for sequence in unpack_sequences(pack)]
            self._batches = padded_batches([s for s in sequences if isinstance(s, ScoredTrajectory)], budget)

    @torch.no_grad()
    def score(self) -> None:
        self.logprobs()

    @torch.no_grad()
    def logprobs(self) -> Tensor:
        """Return (R,) logprobs of the step's response tokens, in the packs' order."""
        return torch.cat([self._compute(batch)[0] for batch in self._batches])

    def forward_backward(self) -> None:
        for batch in self._batches:
            logprobs, advantages = self._compute(batch)
            ratio = torch.exp(logprobs - logprobs.detach())
            (-(advantages * ratio).sum() / self._denominator).backward()

    @torch.no_grad()
    def update(self) -> float:
        for main, weight in zip(self._main, self._weights, strict=True):
            if main is not weight:
                assert weight.grad is not None
                main.grad, weight.grad = weight.grad.float(), None
        norm = float(torch.nn.utils.clip_grad_norm_(self._main, 1.0))
        self._optimizer.step()
        self._optimizer.zero_grad()
        for main, weight in zip(self._main, self._weights, strict=True):
            if main is not weight:
                weight.copy_(main)
        return norm

    def close(self) -> None:
        """Do nothing: there are no resources but memory."""

    def _compute(self, batch: PackedTrajectory | PaddedBatch) -> tuple[Tensor, Tensor]:
        """Return (R,) logprobs and advantages of the batch's response tokens."""
        return self._of_rows(batch) if isinstance(batch, PaddedBatch) else self._of_pack(batch)

    def _of_pack(self, pack: PackedTrajectory) -> tuple[Tensor, Tensor]:
        assert pack.advantages is not None
        tokens, positions, rows, targets, advantages = (
            x.to(self.device)
            for x in (pack.tokens, pack.position_ids, response_logit_index(pack), pack.targets, pack.advantages)
        )
        hidden = self._hidden(tokens[None], positions[None].long())
        return self._head(hidden, rows, targets), advantages

    def _of_rows(self, batch: PaddedBatch) -> tuple[Tensor, Tensor]:
        tokens, rows, targets, advantages = (
            x.to(self.device) for x in (batch.tokens, batch.rows, batch.targets, batch.advantages)
        )
        return self._head(self._hidden(tokens, None), rows, targets), advantages

    def _hidden(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Return (B * L, H) hidden states."""
        output = self._model.model(input_ids=tokens, position_ids=positions, use_cache=False)
        return output.last_hidden_state.flatten(0, 1)

    def _head(self, hidden: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        parts = zip(hidden[rows].split(_HEAD_CHUNK), targets.split(_HEAD_CHUNK), strict=True)
        weight = self._model.lm_head.weight
        return torch.cat([checkpoint(_logprobs, part, weight, targets, use_reentrant=False) for part, targets in parts])


def _logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax((hidden @ weight.T).float(), dim=-1).gather(1, targets[:, None]).squeeze(1)


def _response_tokens(packs: Sequence[PackedTrajectory]) -> float:
    return float(sum(int(pack.loss_mask.sum()) for pack in packs))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
