"""One rank on GPUs, worked out without one: its rows of every parameter, and a step of the model followed on shapes.

The model is followed whole, as it is while its layers are gathered one after the other; what FSDP itself holds and
sends meanwhile follows from the parameters' sizes alone.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.process.rendezvous import fake_world
from backends.common.step.trace import HEAD, Counted, Trace
from backends.common.step.worst_batch import worst_packs
from backends.fsdp import parallel
from backends.fsdp.micro_batch import model_input
from backends.fsdp.model import meta_model, recompute_layers
from backends.fsdp.parallel import Groups, rows_of_rank
from slime_like.config import RunConfig
from slime_like.interfaces.estimate import RankEstimate, RankKind, Traffic, TrainerMemory, Work
from slime_like.trajectory import PackedTrajectory

_MASTER = torch.float32


def rank_kinds(config: RunConfig) -> list[RankKind]:
    """All ranks are alike. The last context rank keeps most of the gathered keys; it stands first."""
    layout = config.trainer.parallel
    ranks = list(range(layout.world_size))
    ranks.insert(0, ranks.pop(layout.context - 1))
    return [RankKind("all ranks", tuple(ranks))]


def estimate(config: RunConfig, rank: int) -> RankEstimate:
    """See ``slime_like.interfaces.Planner.estimate``."""
    with fake_world(rank, config.trainer.parallel.world_size, parallel.leave):
        return _Rank(config, parallel.build_groups(config)).estimate(rank)


class _Rank:
    """This process as one rank, on shapes. What is gathered at once: a layer's parameters, and the root's, all else."""

    def __init__(self, config: RunConfig, groups: Groups) -> None:
        self._config, self._groups = config, groups
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._model = meta_model(config, self._dtype)
        recompute_layers(self._model, config.trainer.recompute)
        self._layers = [sum(p.numel() for p in layer.parameters()) for layer in self._model.layers]
        self._whole = sum(p.numel() for p in self._model.parameters())
        self._root = self._whole - sum(self._layers)
        self._trace = Trace()
        for parameter in self._model.parameters():
            parameter.register_post_accumulate_grad_hook(_forget_gradient)

    def estimate(self, rank: int) -> RankEstimate:
        found = [(*self._passes(pack), pack) for pack in worst_packs(self._config, "contiguous")]
        memory, scoring, training, pack = max(found, key=lambda each: each[0].activation_bytes + each[0].head_bytes)
        sums = self._sums()
        return RankEstimate(
            rank=rank,
            memory=memory,
            forward=scoring.work({}, "context", self._gathers(1)),
            training=training.work({}, "context", self._gathers(2) + (sums if self._sums_always else ())),
            update=Work(0.0, 0.0, () if self._sums_always else sums),
            micro_batch_tokens=pack.packed_seq_len,
            longest=pack.max_seqlen,
            layers=f"Hugging Face's layers, {'ring_flash_attn' if self._by_package else 'allgather'} attention",
        )

    @property
    def _by_package(self) -> bool:
        return self._config.trainer.attention == "ring_flash_attn"

    @property
    def _sums_always(self) -> bool:
        return self._config.trainer.fsdp.accumulate == "sharded"

    # ------------------------------------------------------------------------------------------------------- memory
    def _passes(self, pack: PackedTrajectory) -> tuple[TrainerMemory, Counted, Counted]:
        """Memory with this micro-batch, and the work of scoring and of training it."""
        trace = self._trace
        with trace, trace.head_labelled():
            with torch.no_grad():
                base = trace.restart()
                self._loss(pack)
                forward_peak, scoring = trace.peak - base, trace.counted
            base = trace.restart()
            loss = self._loss(pack)
            saved = trace.live - base
            loss.backward()
            peak, head_bytes = trace.peak - base, trace.peak_labelled.get(HEAD, 0)
        shards = sum(len(rows_of_rank(p)) * p[0].numel() for p in self._model.parameters())
        state, on_host = shards * _MASTER.itemsize, self._config.trainer.optimizer.offload
        between = 0 if self._sums_always else self._whole * _MASTER.itemsize
        # Beside the gradients themselves, their largest message, in float32.
        reduced = max(self._root, *self._layers) * _MASTER.itemsize
        # Whole weights: the root's all along, and a layer's with the next one, which comes meanwhile.
        layers = sorted(self._layers)[-2 if self._config.trainer.fsdp.reshard_after_forward else 0 :]
        memory = TrainerMemory(
            parameters=shards,
            parameter_bytes=0 if on_host else state,
            gradient_bytes=between + (0 if on_host else state),
            optimizer_bytes=0 if on_host else 2 * state,
            activation_bytes=peak - head_bytes + reduced,
            head_bytes=head_bytes,
            saved_bytes=saved,
            in_flight=1,
            forward_bytes=forward_peak,
            update_bytes=0,
            communication_bytes=(self._root + sum(layers)) * self._dtype.itemsize,
            host_optimizer_bytes=4 * state if on_host else 0,
            host_reference_bytes=state if self._config.reference_in_trainer else 0,
        )
        return memory, scoring, trace.counted

    def _loss(self, pack: PackedTrajectory) -> Tensor:
        batch = model_input(pack, torch.device("cpu"), self._groups.context)
        (scored,) = self._model(batch.shard.tokens, batch.shard.position_ids, batch.boundaries, batch.responses, False)
        return torch.stack(batch.whole(scored)).sum()

    # --------------------------------------------------------------------------------------------------------- work
    def _gathers(self, passes: int) -> tuple[Traffic, ...]:
        """Weights: layers once per pass, all else once for both."""
        if not self._config.trainer.fsdp.reshard_after_forward:
            passes = 1
        count = passes * sum(self._layers) + self._root
        return _over_all_ranks(count * self._dtype.itemsize, passes * len(self._layers) + 1)

    def _sums(self) -> tuple[Traffic, ...]:
        """Gradients, each to the rank that keeps it."""
        return _over_all_ranks(self._whole * _MASTER.itemsize, len(self._layers) + 1)


def _over_all_ranks(nbytes: int, calls: int) -> tuple[Traffic, ...]:
    size = dist.get_world_size()
    return () if size == 1 else (Traffic("data", tuple(range(size)), round(nbytes * (size - 1) / size), calls),)


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None  # free as soon as it is complete and summed
