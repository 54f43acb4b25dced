"""Replay of routes: tokens go to given experts, and gradients still flow into the router's scores of these experts.

A pack's ``routes`` have one row for each token that the model reads, which is every token but the last of a sequence.
Layers count from the first one with experts. A token that sequences share follows the first sequence that has a row for
it. Tokens without a route, padding and fillers follow the router.

Tokens whose given experts are the router's own choice, in any order, keep its order. So replaying a router's own choice
changes no bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from backends.common.process.agreement import rank_error
from slime_like.algorithms.context import ContextShard
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import PackedTrajectory

_REMEDIES = {
    "rollout": "sample with an engine and a setting that record routes, or set algorithm.routing_replay to none",
    "old": "score the batch with the policy first",
}


@dataclass(slots=True)
class Replay:
    """Replay in the passes of one step, or of one scoring.

    Attributes:
        mode: ``algorithm.routing_replay``.
        records: the pass doesn't replay, but gives the packs the routes that it takes.
        counts: for every micro-batch, by layer: tokens whose given experts are not the router's choice, and tokens with
            given experts, (2,) int64.
    """

    mode: str
    dimensions: ModelDimensions
    records: bool = False
    counts: list[dict[int, Tensor]] = field(default_factory=list)

    @classmethod
    def in_training(cls, mode: str, dimensions: ModelDimensions) -> Self | None:
        """Return the replay of a step."""
        return None if mode == "none" else cls(mode, dimensions)

    @classmethod
    def in_scoring(
        cls, mode: str, dimensions: ModelDimensions, packs: Sequence[PackedTrajectory], is_step: bool
    ) -> Self | None:
        """Return the replay of a pass of the policy. Packs that need not belong to a step may lack routes."""
        if mode == "old":
            return cls(mode, dimensions, records=True) if is_step else None
        replays = is_step or all(pack.routes is not None for pack in packs)
        return cls.in_training(mode, dimensions) if replays else None

    def metrics(self, device: torch.device) -> dict[str, Any]:
        """Return fields of ``GRPOStats``. Collective over the world."""
        total = torch.zeros(2, dtype=torch.int64, device=device)
        if found := [count for counts in self.counts for count in counts.values()]:
            total += torch.stack(found).sum(dim=0)
        dist.all_reduce(total)
        return {"routing_disagreement": total[0].double() / total[1].clamp_min(1)}


@dataclass(frozen=True, slots=True)
class TokenRoutes:
    """Given or recorded experts of a router's tokens in one micro-batch.

    Attributes:
        rows: (t,) int64, each local token's row in the pack's routes, or -1.
        given: (N, L, k) int16, the pack's routes; ``None`` in a pass that records.
        layers, top_k: the model's layers with experts, and k.
        counts: see ``Replay``.
        chosen: (t, k) int16 by layer, in a pass that records.
    """

    rows: Tensor
    given: Tensor | None
    layers: range
    top_k: int
    counts: dict[int, Tensor]
    chosen: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, pack: PackedTrajectory, shard: ContextShard, rows: slice, replay: Replay) -> Self:
        """Create it on the host for the ``rows`` of the token axis of ``shard``.

        Raises:
            TrainerError: the pack has no routes, or routes that don't fit the model.
        """
        if not replay.records:
            require_routes(pack, replay)
        replay.counts.append({})
        mine, model = rows_of_tokens(pack)[shard.source[rows]], replay.dimensions
        given = None if replay.records else pack.routes
        return cls(mine, given, model.expert_layers, model.moe_top_k, replay.counts[-1])

    @torch.no_grad()
    def choose(self, layer: int, own: Tensor) -> Tensor:
        """Return the (t, k) experts to use in ``layer`` (of all layers), whose router chose ``own``."""
        if self.given is None:
            self.chosen[layer] = own.to(torch.int16)
            return own
        given = self.given[:, self.layers.index(layer)].index_select(0, self.rows.clamp_min(0)).long()
        known = (self.rows >= 0) & (given[:, 0] >= 0)
        differs = known & ~(given[:, :, None] == own[:, None]).any(dim=1).all(dim=1)
        # Assigned, because recomputation runs a layer twice.
        self.counts[layer] = torch.stack([differs.sum(), known.sum()])
        return torch.where(differs[:, None], given, own)

    def store(self, pack: PackedTrajectory, group: dist.ProcessGroup) -> None:
        """Give ``pack`` the recorded routes, if any, -1 in layers of other stages. They stay on the device.

        Collective over ``group``, the ranks that hold parts of the pack.
        """
        if self.given is not None:
            return
        inputs = pack.actual_total_tokens - pack.num_sequences
        whole = torch.full((inputs + 1, len(self.layers), self.top_k), -1, dtype=torch.int32, device=self.rows.device)
        rows = torch.where(self.rows < 0, inputs, self.rows)
        for layer, chosen in self.chosen.items():
            whole[:, self.layers.index(layer)].index_copy_(0, rows, chosen.int())
        if group.size() > 1:
            dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)  # NCCL has no int16
        pack.routes = whole[:-1].to(torch.int16)
        self.chosen.clear()


def rows_of_tokens(pack: PackedTrajectory) -> Tensor:
    """Return each token's row in the pack's routes, (T + 1,) int64, -1 for none; the last entry is for no token."""
    count = pack.actual_total_tokens
    rows = torch.arange(count) - pack.sequence_mask[:count]  # each earlier sequence has one row fewer than tokens
    rows[pack.sequence_map[:, 1] - 1] = count
    if pack.segment_places is not None:
        first = torch.full_like(rows, count).scatter_reduce(0, pack.segment_places, rows, "amin")
        rows = first[pack.segment_places]
    return pad(rows.masked_fill(rows == count, -1), (0, pack.packed_seq_len - count + 1), value=-1)


def require_routes(pack: PackedTrajectory, replay: Replay) -> None:
    """Check a pack's routes on the host. Routes that this trainer recorded are on its device, and right.

    Raises:
        TrainerError: there are none, or they don't fit the model. The message names the sequence.
    """
    if pack.routes is None:
        raise rank_error(
            "reading a micro-batch",
            f"sequence {pack.sequence_ids[0]!r} has no routes, which algorithm.routing_replay={replay.mode} repeats",
            code="routes-missing",
            remedy=_REMEDIES[replay.mode],
        )
    if replay.mode == "rollout" and (problem := next(_misfits(pack, pack.routes, replay.dimensions), None)):
        raise rank_error(
            "reading a micro-batch",
            problem,
            code="routes-of-another-model",
            remedy="sample with the model that is trained, or set algorithm.routing_replay to none",
        )


def _misfits(pack: PackedTrajectory, routes: Tensor, dimensions: ModelDimensions) -> Iterator[str]:
    """Yield how routes do not fit a model."""
    found, fitting = tuple(routes.shape[1:]), (len(dimensions.expert_layers), dimensions.moe_top_k)
    if found != fitting:
        yield (
            f"sequence {pack.sequence_ids[0]!r} has routes of {found[0]} layers with {found[1]} experts per token, but "
            f"the model has {fitting[0]} with {fitting[1]}"
        )
        return
    columns = np.ascontiguousarray(np.moveaxis(routes.numpy(), 2, 0))
    unknown, experts = columns[0] == -1, dimensions.num_experts
    bad = ((columns < 0) != unknown).any(0) | (columns < -1).any(0) | (columns >= experts).any(0)
    for one, other in combinations(columns, 2):
        bad |= (one == other) & ~unknown
    for row, layer in np.argwhere(bad)[:1]:
        ends = (pack.prompt_lens + pack.response_lens - 1).cumsum(0).numpy()
        name = pack.sequence_ids[int(np.searchsorted(ends, row, side="right"))]
        ids = columns[:, row, layer].tolist()
        yield f"sequence {name!r} has the route {ids}, which is not {len(ids)} different experts of {experts}"
