"""A pack on its way into a model.

Whatever follows from lengths, masks and boundaries is computed and checked on the host, where packs arrive, and goes to
the device together, in one copy. From then on a micro-batch runs forward and backward without the host reading
anything back: it would wait for all work that it has given to the device.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.process.agreement import rank_error
from slime_like.algorithms.context import ContextShard
from slime_like.algorithms.packing.pack import move_together, response_tokens
from slime_like.algorithms.segments import require_lengths
from slime_like.algorithms.supports import are_in, padded
from slime_like.algorithms.tensor_checks import require_temperatures
from slime_like.trajectory import PackedTrajectory

_Value = TypeVar("_Value")


@dataclass
class ResponseRows:
    """Rows of the local token axis whose hidden state predicts a response token.

    Attributes:
        index: int64, in order, each once.
        targets, temperatures: (r,) int64 ids of the tokens that they predict, and float64.
        repeats: (r,) int64, for each of these its entry of ``index``, where sequences share rows; else ``None``.
        supports: (r, K) int32 of truncated sampling, else ``None``.
    """

    index: Tensor
    targets: Tensor
    temperatures: Tensor
    repeats: Tensor | None
    supports: Tensor | None = None

    @classmethod
    def of(cls, pack: PackedTrajectory, shard: ContextShard) -> Self:
        """Those of this rank's ``shard`` of ``pack``."""
        temperatures = pack.temperatures.repeat_interleave(pack.response_lens, output_size=pack.targets.numel())
        of_tokens = response_tokens(pack)[shard.response_slot], temperatures[shard.response_slot]
        supports = None
        if pack.support_ids is not None and pack.support_sizes is not None:
            supports = padded(pack.support_ids, pack.support_sizes, shard.response_slot)
        if shard.parents is None:
            return cls(shard.response_index, *of_tokens, None, supports)
        index, repeats = shard.response_index.unique(return_inverse=True)
        return cls(index, *of_tokens, repeats, supports)

    def spread(self, scored: Tensor) -> Tensor:
        """(r, H) from the hidden states of ``index``, differentiable: the gradients of a shared row add up."""
        return scored if self.repeats is None else scored.index_select(0, self.repeats)


@dataclass(slots=True)
class MicroBatch:
    """The pack as ``given`` to the trainer, the same on this rank's device, whole, and this rank's part of it.

    ``context``: ranks that share the pack.
    """

    given: PackedTrajectory
    pack: PackedTrajectory
    shard: ContextShard
    context: dist.ProcessGroup

    def whole(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """(R,) logprobs and entropies of the pack from this context rank's (2, r), differentiable."""
        scattered = torch.stack([self.shard.scatter(part[0]), self.shard.scatter(part[1])])
        logprobs, entropy = join_context_parts(scattered, self.context)
        return logprobs, entropy


def require_computable(pack: PackedTrajectory, vocab_size: int) -> None:
    """Check, where the pack lies, the values by which kernels index and divide: nothing later waits to read them.

    Raises:
        TrainerError: a token outside the vocabulary; the message names the sequence.
        ValueError: temperatures that scale no logits, or lengths that are not those of the targets.
    """
    require_temperatures(pack.temperatures)
    require_lengths(pack.response_lens, pack.targets.numel())
    if pack.support_ids is not None and pack.support_sizes is not None and not _is_drawn(pack):
        raise rank_error(
            "reading a micro-batch",
            "a sampled token is not in the support that it was drawn from",
            code="token-outside-support",
            remedy="report it: the engine's supports and tokens do not belong together",
        )
    if (highest := int(pack.tokens.max())) >= vocab_size:
        sequence = int(pack.sequence_mask[pack.tokens.argmax()])
        raise rank_error(
            "reading a micro-batch",
            f"sequence {pack.sequence_ids[sequence]!r} has the token id {highest}, the vocabulary {vocab_size} tokens"
            if sequence >= 0
            else f"pad_token_id={highest} is outside the vocabulary of {vocab_size} tokens",
            code="token-outside-vocabulary",
            remedy="encode with the tokenizer of model.path",
        )


def _is_drawn(pack: PackedTrajectory) -> bool:
    """Whether every token that carries loss is in its support."""
    assert pack.support_ids is not None and pack.support_sizes is not None
    carrying = pack.loss_mask.nonzero()[:, 0]
    supports = padded(pack.support_ids, pack.support_sizes, carrying)
    return bool(are_in(supports, response_tokens(pack)[carrying]).all())


def on_device(value: _Value, device: torch.device) -> _Value:
    """Copy of a dataclass, or of a tuple of some, whose tensors lie on ``device``; itself where they do.

    All tensors of the host, at any depth of dataclasses and tuples, go over in one copy, from pinned memory, for which
    the host does not wait. Tensors that are one object stay one. What has no tensors is not copied.
    """
    if device.type == "cpu":
        return value
    found: dict[int, Tensor] = {}
    _each_tensor(value, lambda tensor: found.setdefault(id(tensor), tensor))
    on_host = {str(key): tensor for key, tensor in found.items() if tensor.device.type == "cpu"}
    moved = move_together(on_host, device)
    placed: _Value = _each_tensor(value, lambda tensor: moved.get(str(id(tensor)), tensor))
    return placed


def _each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with every tensor changed; the same object where none is."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is tuple:
        parts = tuple(_each_tensor(part, change) for part in value)
        return value if all(part is before for part, before in zip(parts, value, strict=True)) else parts
    if not is_dataclass(value):
        return value
    before = {each.name: getattr(value, each.name) for each in fields(value)}
    after = {name: _each_tensor(part, change) for name, part in before.items()}
    changed = {name: part for name, part in after.items() if part is not before[name]}
    return replace(cast(Any, value), **changed) if changed else value


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def join_context_parts(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the context group of parts that are zero where another rank's tokens stand.

    Every rank computes the same loss of the whole result. In backward each keeps the gradient as it is, and so takes
    its own tokens' share of it: the sum over ranks, which data-parallel reduction makes, is the gradient once.
    """
    return part if group.size() == 1 else _SumForward.apply(part, group)
