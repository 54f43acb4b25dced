"""Check, when a trainer starts, of the replaced attention and head against the model's unchanged forward pass.

A pack of a few short sequences runs through packed attention and the chunked head. Each sequence also runs through the
model as transformers computes it, with its masks and logits. This reveals scaled logits, and positions that are not
counted from the sequence's beginning. The pack runs once more with other tokens in its first sequence, which must not
affect the others. This reveals layers that mix tokens outside transformers' attention interface, above all convolutions
and recurrences. Sliding windows that sequences may exceed are narrowed to a few tokens meanwhile, which reveals layers
whose window is only in transformers' masks.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backends.fsdp.model import FsdpModel
from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.config import ModelConfig
from slime_like.errors import ConfigError
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory

LENGTHS = ((3, 14), (1, 6), (9, 8))
"""Numbers of prompt and response tokens."""

NARROW = 4
"""The sliding windows' tokens, fewer than most of these sequences have."""

BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25}
"""Largest mean difference of logprobs (nats) or values. In 16 bits, equal computations differ by a few hundredths."""

LEAKS = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Largest difference of any logprob (nats) or value between packs of equal shapes that differ in another sequence."""


@torch.no_grad()
def require_own_forward(
    settings: ModelConfig,
    dimensions: ModelDimensions,
    model: FsdpModel,
    score: Callable[[Sequence[PackedTrajectory]], list[tuple[Tensor, ...]]],
    device: torch.device,
) -> None:
    """Reject a model if ``score`` and transformers compute different results. Collective.

    Raises:
        ConfigError: the model cannot compute a pack, the logprobs or values differ, or a sequence of a pack affects the
            next one.
    """
    path, dtype = settings.path, getattr(torch, settings.dtype)
    what, unit = ("values", "") if model.values else ("logprobs", " nats")
    pack, changed = (_probe(dimensions, seed) for seed in (0, 1))
    try:
        ours, others = (logprobs.double() for logprobs, *_ in score([pack, changed]))
    except (TypeError, AttributeError, LookupError, ValueError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError | dist.DistError):  # of the machine, not of the model
            raise
        raise ConfigError(
            f"model.path={path}: the layers of transformers cannot compute a micro-batch without its masks and cache "
            f"({type(error).__name__}: {error}), as trainer.backend=fsdp needs it; use another model"
        ) from error
    gap = float((ours - others)[int(pack.response_lens[0]) :].abs().max())
    if not gap <= LEAKS[dtype]:  # also rejects NaN
        raise ConfigError(
            f"model.path={path}: in its layers a sequence affects the next one in a micro-batch ({what} change "
            f"by {gap:.3g}{unit}), for example through convolutions or recurrences over tokens, which "
            "trainer.backend=fsdp does not stop at boundaries; use another model"
        )
    expected = []
    for index, (prompt, response) in enumerate(zip(pack.prompt_lens, pack.response_lens, strict=True)):
        start = int(pack.cu_seqlens[index])
        tokens = pack.tokens[start : start + int(prompt + response)].to(device)
        outputs, chosen = model.own_logits(tokens).float(), torch.zeros_like(tokens)
        if not model.values:
            outputs, chosen = outputs.log_softmax(dim=-1), tokens
        expected.append(outputs[int(prompt) - 1 : -1].gather(1, chosen[int(prompt) :, None]).squeeze(1))
    model.shard_weights()
    gap = float((ours - torch.cat(expected).double()).abs().mean())
    if not gap <= BOUNDS[dtype]:
        raise ConfigError(
            f"model.path={path}: trainer.backend=fsdp computes {what} that differ from those of transformers' own "
            f"forward pass by {gap:.3g}{unit} on average (allowed: {BOUNDS[dtype]:g}); its attention or head does "
            "not support packs, so use another model"
        )


@contextlib.contextmanager
def narrow_windows(model: Any) -> Iterator[None]:
    """Inside, sliding windows of transformers' ``model`` have at most ``NARROW`` tokens, except those as wide as its
    context."""
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", math.inf)
    owners = [(each, getattr(each, "sliding_window", None)) for each in (config, *model.modules())]
    widths = [(each, width) for each, width in owners if width is not None and width < context]
    for each, width in widths:
        each.sliding_window = min(width, NARROW)
    try:
        yield
    finally:
        for each, width in widths:
            each.sliding_window = width


def _probe(dimensions: ModelDimensions, seed: int) -> PackedTrajectory:
    """Build the sequences, the same on every rank, within the model's reach. ``seed`` determines the first's tokens."""
    most = max(2, dimensions.attention.reach or max(map(sum, LENGTHS)))
    sequences = []
    for index, (prompt_len, response_len) in enumerate(LENGTHS):
        generator = torch.Generator().manual_seed(index or seed + len(LENGTHS))
        prompt_len = min(prompt_len, most - 1)
        lengths = prompt_len, min(response_len, most - prompt_len)
        prompt, response = (torch.randint(dimensions.vocab_size, (n,), generator=generator) for n in lengths)
        sequences.append(ScoredTrajectory.unrewarded(f"probe-{index}", prompt, response, group_id=index))
    return pack_sequences(sequences)
