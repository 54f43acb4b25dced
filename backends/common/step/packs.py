"""Transfer of a pack into a model.

Everything derived from lengths, masks and boundaries is computed and checked on the host, where packs arrive, and is
moved to the device in one copy. From then on, a micro-batch runs forward and backward without reading anything back to
the host, which would wait for all queued device work.
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
from slime_like.algorithms.segments import require_lengths, require_temperatures
from slime_like.algorithms.softmax import are_in, pad_supports
from slime_like.trajectory import PackedTrajectory

_Value = TypeVar("_Value")


@dataclass
class ResponseRows:
    """Rows of the local token axis whose hidden state predicts a response token.

    Attributes:
        index: int64, sorted, each once.
        targets, temperatures: (r,) int64 ids of the predicted tokens, and float64.
        repeats: (r,) int64 entry of ``index`` for each predicted token if sequences share rows; else ``None``.
        supports: (r, K) int32 of truncated sampling, else ``None``.
        teacher: (r, H) float32 hidden states of a teacher, else ``None``.
        source: source of all sequences, which has that teacher; ``None`` if they have several.
    """

    index: Tensor
    targets: Tensor
    temperatures: Tensor
    repeats: Tensor | None
    supports: Tensor | None = None
    teacher: Tensor | None = None
    source: str | None = None

    @classmethod
    def of(cls, pack: PackedTrajectory, shard: ContextShard) -> Self:
        """Return the rows of ``pack`` that belong to this rank's ``shard``."""
        temperatures = pack.temperatures.repeat_interleave(pack.response_lens, output_size=pack.targets.numel())
        of_tokens = response_tokens(pack)[shard.response_slot], temperatures[shard.response_slot]
        supports = None
        if pack.support_ids is not None and pack.support_sizes is not None:
            supports = pad_supports(pack.support_ids, pack.support_sizes, shard.response_slot)
        teacher = None if pack.teacher_hidden is None else pack.teacher_hidden[shard.response_slot]
        if shard.parents is None:
            return cls(shard.response_index, *of_tokens, None, supports, teacher, pack.source)
        index, repeats = shard.response_index.unique(return_inverse=True)
        return cls(index, *of_tokens, repeats, supports, teacher, pack.source)

    def spread(self, scored: Tensor) -> Tensor:
        """Expand the hidden states of ``index`` to (r, H). Differentiable: gradients of a shared row add up."""
        return scored if self.repeats is None else scored.index_select(0, self.repeats)


@dataclass(slots=True)
class MicroBatch:
    """The pack as ``given`` to the trainer, the whole pack on this rank's device, and this rank's part of it.

    ``context``: ranks that share the pack.
    """

    given: PackedTrajectory
    pack: PackedTrajectory
    shard: ContextShard
    context: dist.ProcessGroup

    def whole(self, part: Tensor) -> tuple[Tensor, ...]:
        """Join this context rank's part of a head's outputs, (outputs, r, ...), into (R, ...) each; differentiable."""
        scattered = torch.stack([self.shard.scatter(row) for row in part.unbind()])
        return join_context_parts(scattered, self.context).unbind()


def require_computable(pack: PackedTrajectory, vocab_size: int) -> None:
    """Check the values that kernels index and divide by, on the host: later, reading them would wait for the device.

    Raises:
        TrainerError: a token is outside the vocabulary; the message names the sequence.
        ValueError: temperatures that cannot scale logits, or lengths that don't match the targets.
    """
    require_temperatures(pack.temperatures)
    require_lengths(pack.response_lens, pack.targets.numel())
    if pack.support_ids is not None and pack.support_sizes is not None:
        carrying = pack.loss_mask.nonzero()[:, 0]
        supports = pad_supports(pack.support_ids, pack.support_sizes, carrying)
        if not are_in(supports, response_tokens(pack)[carrying]).all():
            raise rank_error(
                "reading a micro-batch",
                "a sampled token is not in the support that it was sampled from",
                code="token-outside-support",
                remedy="report it: the engine's supports and tokens do not belong together",
            )
    if (highest := int(pack.tokens.max())) >= vocab_size:
        sequence = int(pack.sequence_mask[pack.tokens.argmax()])
        raise rank_error(
            "reading a micro-batch",
            f"sequence {pack.sequence_ids[sequence]!r} has token id {highest}, but the vocabulary {vocab_size} tokens"
            if sequence >= 0
            else f"pad_token_id={highest} is outside the vocabulary of {vocab_size} tokens",
            code="token-outside-vocabulary",
            remedy="encode with the tokenizer of model.path",
        )


def on_device(value: _Value, device: torch.device) -> _Value:
    """Copy a dataclass, or a tuple of them, with its tensors on ``device``. Unchanged if they are there already.

    All host tensors, at any depth of dataclasses and tuples, move in one copy from pinned memory, without a wait on the
    host. Tensors that are one object stay one. Parts without tensors are not copied.
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
    """Apply ``change`` to every tensor in ``value``; return the same object if nothing changes."""
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
    """Sum parts over the context group. Each part is zero at other ranks' tokens.

    Every rank computes the same loss of the whole result. In backward, each keeps the gradient unchanged and so takes
    its tokens' share: data-parallel reduction, the sum over ranks, then yields the gradient once.
    """
    return part if group.size() == 1 else _SumForward.apply(part, group)
