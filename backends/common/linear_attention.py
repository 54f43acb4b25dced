"""Gated delta net over packed sequences (arXiv:2412.06464), between a layer's projections.

State and convolution begin anew in every sequence. Sequences are cut into chunks of 64 tokens: matrix products compute
all chunks' inner parts at once, and one pass over the chunks' indices carries the states of all sequences. With context
ranks, every rank computes some heads of whole sequences, between two all-to-all exchanges.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from slime_like.algorithms.context import ContextShard, places
from slime_like.checks.packages import fla_problem
from slime_like.errors import TrainerError

CHUNK = 64
"""Tokens of a chunk; the last one of a sequence may have fewer."""

NORM_EPS = 1e-6
"""Epsilon of the queries' and keys' norms."""


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Sequences of one token axis, as the convolution and the recurrence read them.

    Attributes:
        cu_seqlens: (S+1,) int64.
        chunks: (chunks, 2) int64, the sequence of each chunk, and its index there.
        segment: (T,) int64, each token's sequence.
        place: (T,) int64, each token's row if every chunk has ``CHUNK`` rows. Chunks are ordered by their index in the
            sequence, then by descending number of chunks of the sequence.
        alive: number of sequences that have a first, a second, ... chunk.
    """

    cu_seqlens: Tensor
    chunks: Tensor
    segment: Tensor
    place: Tensor
    alive: tuple[int, ...]

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> Self:
        """Create it from (S+1,) boundaries on the host. Leaves out empty sequences."""
        cu_seqlens = torch.unique_consecutive(cu_seqlens).long()
        lengths = cu_seqlens.diff()
        segment = torch.arange(len(lengths)).repeat_interleave(lengths)
        offset = torch.arange(len(segment)) - cu_seqlens[segment]
        chunks = (lengths + CHUNK - 1) // CHUNK
        rank = chunks.argsort(descending=True, stable=True).argsort()
        alive = (chunks[:, None] > torch.arange(int(chunks.max()))).sum(0)
        index = offset // CHUNK
        first = (alive.cumsum(0) - alive)[index]
        place = (first + rank[segment]) * CHUNK + offset % CHUNK
        is_first = offset % CHUNK == 0
        pairs = torch.stack([segment[is_first], index[is_first]], dim=1)
        return cls(cu_seqlens, pairs, segment, place, tuple(alive.tolist()))


class _Fla(NamedTuple):
    """Functions of fla."""

    rule: Callable[..., Any]
    conv: Callable[..., Any]


@cache
def _fla_on(device: torch.device) -> _Fla | None:
    if device.type != "cuda" or fla_problem(torch.cuda.get_device_capability(device)) is not None:
        return None
    rule, conv = import_module("fla.ops.gated_delta_rule"), import_module("fla.modules.causal_conv1d")
    return _Fla(rule.chunk_gated_delta_rule, conv.causal_conv1d)


def _fla_for(x: Tensor) -> _Fla | None:
    """Return fla's functions if they compute tensors like ``x``."""
    return None if x.dtype in (torch.float32, torch.float64) else _fla_on(x.device)


def causal_conv(x: Tensor, weight: Tensor, boundaries: Boundaries) -> Tensor:
    """Convolve every channel over the current and the preceding tokens of the same sequence, and apply SiLU.

    Args:
        x: (T, C).
        weight: (C, width); the last column is for the current token.

    Returns:
        (T, C) in the type of x. Sums are at least float32.
    """
    if (fla := _fla_for(x)) is not None:
        places = {"cu_seqlens": boundaries.cu_seqlens, "chunk_indices": boundaries.chunks}
        out: Tensor = fla.conv(x[None], weight, activation="silu", **places)[0][0]
        return out
    return F.silu(_CausalConv.apply(x, weight, boundaries))


class _CausalConv(torch.autograd.Function):
    """A product and a sum of whole rows for each column of the weight. A GPU's kernels for ``conv1d`` with one channel
    per group read along the tokens, and so would need x transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, boundaries: Boundaries) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.boundaries = boundaries
        return _shifted_sum(_spaced(x, boundaries, weight.shape[1] - 1, before=True), weight, boundaries).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        width = weight.shape[1]
        after = _spaced(grad, ctx.boundaries, width - 1, before=False)
        of_x = _shifted_sum(after, weight.flip(1), ctx.boundaries).to(x.dtype)
        spaced, wide = _spaced(x, ctx.boundaries, width - 1, before=True), _wide(grad.dtype)
        after = after[: len(after) - width + 1].to(wide)
        of_weight = [(after * spaced[column : column + len(after)]).sum(0) for column in range(width)]
        return of_x, torch.stack(of_weight, dim=1).to(weight.dtype), None


def _rows(boundaries: Boundaries, gap: int) -> Tensor:
    """Return the row of every token if ``gap`` rows follow each sequence."""
    return torch.arange(len(boundaries.segment), device=boundaries.segment.device) + gap * boundaries.segment


def _spaced(x: Tensor, boundaries: Boundaries, gap: int, *, before: bool) -> Tensor:
    """Put ``gap`` rows of zeros before, or else after, every sequence."""
    spaced = x.new_zeros(len(x) + gap * (len(boundaries.cu_seqlens) - 1), x.shape[1])
    return spaced.index_copy_(0, _rows(boundaries, gap) + gap * before, x)


def _shifted_sum(spaced: Tensor, weight: Tensor, boundaries: Boundaries) -> Tensor:
    """Add ``width`` rows from each token's place on, each times its column of the (C, width) weight."""
    width = weight.shape[1]
    count, columns = len(spaced) - width + 1, weight.to(_wide(spaced.dtype)).t().contiguous()
    total = spaced[:count] * columns[0]
    for number in range(1, width):
        total.addcmul_(spaced[number : number + count], columns[number])
    return total.index_select(0, _rows(boundaries, width - 1))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def gated_delta_net(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, boundaries: Boundaries) -> Tensor:
    """Compute ``S_t = e^g_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T`` and read ``S_t^T q_t / sqrt(K)``.

    Queries and keys have length 1 here. States are 0 before every sequence, and at least float32.

    Args:
        q, k: (T, G, K) before their norms. Consecutive value heads share one of the G heads.
        v: (T, H, V).
        g, beta: (T, H) logarithms of decays, and step sizes.

    Returns:
        (T, H, V) in the type of q; differentiable. On CUDA in 16 bits, fla's kernels compute it if they can.
    """
    if (fla := _fla_for(q)) is not None:
        inputs = (x[None] for x in (q, k, v, g, beta))
        places = {"cu_seqlens": boundaries.cu_seqlens, "chunk_indices": boundaries.chunks}
        out: Tensor = fla.rule(*inputs, use_qk_l2norm_in_kernel=True, **places)[0][0]
        return out
    dtype, wide, heads = v.dtype, _wide(q.dtype), v.shape[1]
    q, k = (_unit(x.to(wide)).repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k))
    whole = torch.cat([q * q.shape[2] ** -0.5, k, v.to(wide), g[..., None].to(wide), beta[..., None].to(wide)], dim=2)
    rows = whole.new_zeros(sum(boundaries.alive) * CHUNK, *whole.shape[1:]).index_copy(0, boundaries.place, whole)
    rows = rows.unflatten(0, (-1, CHUNK)).transpose(1, 2)  # (chunks, H, CHUNK, ...)
    q, k, v, g, beta = rows.split([q.shape[2], k.shape[2], v.shape[2], 1, 1], dim=3)
    rows = _chunked(q, k, v, g, beta, boundaries.alive)
    return rows.transpose(1, 2).flatten(0, 1).index_select(0, boundaries.place).to(dtype)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def _chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, alive: tuple[int, ...]) -> Tensor:
    """Compute the recurrence of (chunks, H, CHUNK, ...) inputs, in which missing tokens are 0 (section 3.3)."""
    # Sums may be in the hundreds where their differences, the exponents that matter, are near 0.
    decay = g.double().cumsum(2)
    ratio = (decay - decay.transpose(2, 3)).tril().to(g.dtype).exp().tril()  # the first tril avoids infinities
    kept, rest, whole = (x.to(g.dtype).exp() for x in (decay, decay[:, :, -1:] - decay, decay[:, :, -1:]))
    # A token's update of the state depends on earlier updates in its chunk: a triangular system.
    system = beta * (k @ k.transpose(2, 3)) * ratio
    right = beta * torch.cat([v, kept * k], dim=3)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    added, read = solved.split([v.shape[3], k.shape[3]], dim=3)
    steps = (added, read, kept * q, (q @ k.transpose(2, 3)) * ratio, rest * k, whole)
    state = v.new_zeros(alive[0], v.shape[1], k.shape[3], v.shape[3])
    found = []
    for values, read_keys, queries, scores, keys, faded in zip(*(x.split(alive) for x in steps), strict=True):
        state = state[: len(values)]
        values = values - read_keys @ state
        found.append(queries @ state + scores @ values)
        state = faded * state + keys.transpose(2, 3) @ values
    return torch.cat(found)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Boundaries of one micro-batch, and how its context ranks share the heads.

    Attributes:
        boundaries: of whole sequences.
        order: (T,) int64, places in rank order of the tokens in sequence order.
        back: its inverse.
        group: the context ranks; ``None`` for one.
    """

    boundaries: Boundaries
    order: Tensor
    back: Tensor
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, shard: ContextShard, group: dist.ProcessGroup) -> Self:
        """Create it for the pack that ``shard`` is this rank's part of.

        Raises:
            TrainerError: sequences share prefixes.
        """
        if shard.parents is not None:  # for a policy, rejected before the start
            raise TrainerError(
                "layers with linear attention keep one state per sequence, so sequences cannot share prefixes",
                code="prefixes-not-supported",
                remedy="set trainer.share_prefixes=false",
            )
        padded, size = shard.cu_seqlens_padded, group.size()
        back = torch.cat([places(padded, size, rank, shard.layout) for rank in range(size)])
        return cls(Boundaries.of(padded), back.argsort(), back, group if size > 1 else None)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor
    ) -> Tensor:
        """Convolve, and compute the recurrence of, all heads of the local tokens.

        Args:
            q, k: (T_local, G, K) projections.
            v: (T_local, H, V).
            a, b: (T_local, H), inputs of decays and step sizes.
            conv: (2 * G * K + H * V, width) weight of the convolution, for all heads' q, k and v.
            a_log, dt_bias: (H,) parameters of the decays.

        Returns:
            (T_local, H, V) before norm and gate.
        """
        groups, each = q.shape[1], v.shape[1] // q.shape[1]
        mixed = torch.cat([q, k, v.unflatten(1, (groups, each)).flatten(2)], dim=2)
        sizes = [groups * size for size in (q.shape[2], k.shape[2], each * v.shape[2])]
        weight = torch.cat([x.unflatten(0, (groups, -1)) for x in conv.split(sizes)], dim=1)
        a, b, a_log, dt_bias = (x.unflatten(-1, (groups, each)) for x in (a, b, a_log, dt_bias))
        return self.mix_by_head(mixed, a, b, weight, a_log, dt_bias, q.shape[2])

    def mix_by_head(
        self, mixed: Tensor, a: Tensor, b: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, key_size: int
    ) -> Tensor:
        """Do the same for inputs and parameters grouped by key head.

        Args:
            mixed: (T_local, G, C), each key head's query, key and values.
            a, b: (T_local, G, H / G).
            conv: (G, C, width).
            a_log, dt_bias: (G, H / G).
            key_size: K.
        """
        if self.group is not None:
            widths = [mixed.shape[2], a.shape[2], b.shape[2]]
            mixed, a, b = self._whole(torch.cat([mixed, a, b], dim=2)).split(widths, dim=2)
            conv, a_log, dt_bias = (x.chunk(self.group.size())[self.group.rank()] for x in (conv, a_log, dt_bias))
        convolved = causal_conv(mixed.flatten(1), conv.flatten(0, 1), self.boundaries).view(mixed.shape)
        q, k, v = convolved.split([key_size, key_size, mixed.shape[2] - 2 * key_size], dim=2)
        wide = _wide(a.dtype)
        g = -a_log.to(wide).exp() * F.softplus(a.to(wide) + dt_bias)
        v = v.unflatten(2, (a.shape[2], -1)).flatten(1, 2)
        return self._local(gated_delta_net(q, k, v, g.flatten(1), b.sigmoid().flatten(1), self.boundaries))

    def _whole(self, x: Tensor) -> Tensor:
        """Exchange all heads of the local tokens, (T_local, heads, ...), for some heads of all tokens, in order."""
        assert self.group is not None
        parts = x.unflatten(1, (self.group.size(), -1)).transpose(0, 1)
        return _Exchanged.apply(parts, self.group).flatten(0, 1).index_select(0, self.order)

    def _local(self, x: Tensor) -> Tensor:
        """Invert ``_whole``."""
        if self.group is None:
            return x
        parts = x.index_select(0, self.back).unflatten(0, (self.group.size(), -1))
        return _Exchanged.apply(parts, self.group).transpose(0, 1).flatten(1, 2)


class _Exchanged(torch.autograd.Function):
    """Sends the i-th part to rank i, and returns the parts of all ranks. It is its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, received = group, torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Exchanged.apply(grads[0], ctx.group), None
