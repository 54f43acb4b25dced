"""Estimate of one rank on GPUs, without GPUs: its rows of every parameter, and traced steps of the sharded model on
shapes. FSDP's code gathers weights, frees them and sums gradients, and every storage and message is traced."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from backends.common.process.rendezvous import communicators, fake_world
from backends.common.step.shapes import META
from backends.common.step.teacher import Teachers
from backends.common.step.trace import HEAD, Counted, Trace
from backends.common.step.worst_batch import attention_length, worst_packs
from backends.fsdp import parallel
from backends.fsdp.attention import model_input
from backends.fsdp.model import FsdpModel, sharded_meta_model
from backends.fsdp.parallel import FsdpGroups, shard_of
from slime_like.config import RunConfig, TrainerConfig
from slime_like.config.roles import POLICY, ModelRole
from slime_like.interfaces.estimate import RankEstimate, RankKind, Traffic, TrainerMemory, Work
from slime_like.trajectory import PackedTrajectory

GATHERED, GRADIENTS = "gathered", "gradients"
"""Labels of gathered weights with their buffers, and of float32 gradients, whole or summed, with their messages."""


class ShardedShapes:
    """A model whose parameter shards, and everything FSDP makes from them, are on torch's meta device.

    Attributes:
        on_host: gradients move to host memory as soon as they are summed.
    """

    def __init__(self, model: FsdpModel, trace: Trace, on_host: bool) -> None:
        self.model = model
        self._messages = {GATHERED: Counted(), GRADIENTS: Counted()}
        self._trace = trace
        self._on_host = on_host
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self._put_on_meta(module._get_fsdp_state()._fsdp_param_group)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Let the trace see the model's passes inside the block."""
        module: Any = torch
        module.meta = torch.cpu  # FSDP finds a device's streams in torch's module of its name; the CPU's do nothing
        try:
            with self._trace, self._trace.head_labelled(), self._trace.follow_resizes():
                yield
        finally:
            del module.meta

    def take_messages(self) -> tuple[Counted, Counted]:
        """Return messages of weights and of gradients since the last call."""
        found = self._messages
        self._messages = {label: Counted() for label in found}
        return found[GATHERED], found[GRADIENTS]

    def _label_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if parameter.grad.dtype == torch.float32:  # others are cast as soon as their layer has all of them
            self._trace.relabel(parameter.grad, GRADIENTS)

    def _put_on_meta(self, group: Any) -> None:
        """Move parameters that FSDP gathers together to meta.

        FSDP takes its device from the ranks' mesh, and rejects shards without memory.
        """
        group.device = META
        for parameter in group.fsdp_params:
            parameter.device = META
        group._validate_no_meta_params = lambda: None
        group.unshard = self._trace_call(group.unshard, GATHERED)
        group.wait_for_unshard = self._hook_gradients(group, self._trace_call(group.wait_for_unshard, GATHERED))
        summed = self._trace_call(group.post_backward, GRADIENTS)
        group.post_backward = self._move_to_host(group, summed) if self._on_host else summed

    def _trace_call(self, call: Callable[..., Any], label: str) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            with self._trace.label(label), self._trace.counting(self._messages[label]):
                return call(*arguments, **options)

        return noted

    def _hook_gradients(self, group: Any, wait_for_unshard: Callable[..., Any]) -> Callable[..., None]:
        """Label gradients as soon as autograd has them. Whole parameters exist only after the first gather."""
        hooked: list[Any] = []

        def waited(*arguments: Any) -> None:
            wait_for_unshard(*arguments)
            if not hooked and group.is_unsharded:
                hooked.extend(
                    parameter.unsharded_param.register_post_accumulate_grad_hook(self._label_gradient)
                    for parameter in group.fsdp_params
                    if parameter.sharded_param.requires_grad
                )

        return waited

    def _move_to_host(self, group: Any, post_backward: Callable[..., Any]) -> Callable[..., None]:
        """Move offloaded, summed gradients off the device immediately."""

        def moved(*arguments: Any) -> None:
            post_backward(*arguments)
            for parameter in group.fsdp_params:
                parameter.sharded_param.grad = None

        return moved


def rank_kinds(trainer: TrainerConfig) -> list[RankKind]:
    """Return one kind for all ranks. The last context rank keeps most of the gathered keys, so it comes first."""
    layout = trainer.parallel
    ranks = list(range(layout.world_size))
    ranks.insert(0, ranks.pop(layout.context - 1))
    return [RankKind("all ranks", tuple(ranks))]


def estimate(config: RunConfig, rank: int, role: str = POLICY) -> RankEstimate:
    """See ``slime_like.interfaces.Planner.estimate``."""
    with fake_world(rank, config.trainer.parallel.world_size, parallel.leave):
        return _Rank(config, parallel.build_groups(config.trainer), config.roles[role]).estimate(rank)


@dataclass(frozen=True, slots=True)
class _TracedBatch:
    """A traced micro-batch, scored, and trained in a window of several. In bytes on top of the shards.

    Attributes:
        forward_peak, peak: peaks of scoring and of training.
        labelled: parts of ``peak``.
        saved: activations kept from forward to backward.
        scoring, training: work of the model itself.
        score_gathers, train_gathers, sums: messages of weights, and of gradients if they are summed.
    """

    pack: PackedTrajectory
    forward_peak: int
    peak: int
    labelled: dict[str, int]
    saved: int
    scoring: Counted
    training: Counted
    score_gathers: Counted
    train_gathers: Counted
    sums: Counted


class _Rank:
    """This process acting as one rank, on shapes."""

    def __init__(self, config: RunConfig, groups: FsdpGroups, role: ModelRole) -> None:
        self._held = config.roles.held if role.name == POLICY else []
        self._config, self._groups = config, groups
        self._trace = Trace()
        has_entropy, values = config.algorithm.entropy_coef > 0, role.head == "value"
        model = sharded_meta_model(config.model, config.trainer, groups, has_entropy, values)
        self._shapes = ShardedShapes(model, self._trace, config.trainer.optimizer.offload)
        self._model = self._shapes.model
        self._model.teachers = Teachers()
        if role.name == POLICY:
            rows = len(self._model.hugging_face.get_output_embeddings().weight)
            self._model.teachers = Teachers.planned(config.distillation, rows, getattr(torch, config.model.dtype))

    def estimate(self, rank: int) -> RankEstimate:
        with self._shapes.tracing():
            found = [self._trace_batch(pack) for pack in worst_packs(self._config, "contiguous")]
        worst = max(found, key=lambda each: each.peak)
        sums = _messages(worst.sums)
        attention = "ring_flash_attn" if self._config.trainer.attention == "ring_flash_attn" else "allgather"
        return RankEstimate(
            rank=rank,
            memory=self._memory(worst, max(each.forward_peak for each in found)),
            forward=worst.scoring.work({}, "context", _messages(worst.score_gathers)),
            training=worst.training.work(
                {}, "context", _messages(worst.train_gathers) + (sums if self._sums_always else ())
            ),
            update=Work(0.0, 0.0, () if self._sums_always else sums),
            longest=attention_length(worst.pack),
            communicators=communicators(),
            layers=f"Hugging Face's layers, {attention} attention",
        )

    @property
    def _sums_always(self) -> bool:
        return self._config.trainer.fsdp.accumulate == "sharded"

    def _trace_batch(self, pack: PackedTrajectory) -> _TracedBatch:
        """Score, then train a window of two. The second runs with the first one's gradients in memory, and sums."""
        trace, shapes = self._trace, self._shapes
        base = trace.restart()
        with torch.no_grad():
            self._loss(pack)
        self._model.shard_weights()
        forward_peak, scoring = trace.peak - base, trace.counted
        score_gathers, _ = shapes.take_messages()
        trace.restart()
        saved = self._train(pack, last=False)
        training, trace.counted = trace.counted, Counted()
        train_gathers, _ = shapes.take_messages()
        self._train(pack, last=True)
        _, sums = shapes.take_messages()
        peak, labelled = trace.peak - base, trace.peak_labelled
        for parameter in self._model.parameters():
            parameter.grad = None
        self._model.shard_weights()
        gathers = score_gathers, train_gathers
        return _TracedBatch(pack, forward_peak, peak, labelled, saved, scoring, training, *gathers, sums)

    def _train(self, pack: PackedTrajectory, last: bool) -> int:
        """Run forward and backward; return the bytes of activations kept between them."""
        self._model.sum_gradients(last or self._sums_always)
        before = self._activations()
        loss = self._loss(pack)
        saved = self._activations() - before
        loss.backward()
        return saved

    def _activations(self) -> int:
        return sum(nbytes for label, nbytes in self._trace.labelled.items() if label not in (GATHERED, GRADIENTS))

    def _loss(self, pack: PackedTrajectory) -> Tensor:
        batch = model_input(pack, torch.device("cpu"), self._groups.context, recurs=self._model.recurs)
        self._model.teachers.add_planned(batch.responses)
        scored = self._model(batch.shard.tokens, batch.shard.position_ids, batch.mixers, batch.responses)
        return torch.stack(batch.whole(scored)).sum()

    def _memory(self, worst: _TracedBatch, forward_peak: int) -> TrainerMemory:
        shards = [shard_of(parameter) for parameter in self._model.parameters()]
        padded = sum(shard.untyped_storage().nbytes() for shard in shards)
        state, on_host = sum(shard.nbytes for shard in shards), self._config.trainer.optimizer.offload
        trained = sum(each.nbytes for each in (shard_of(p) for p in self._model.parameters() if p.requires_grad))
        gradients = 0 if on_host else trained
        same = [self._config.has_same_base(role) for role in self._held]
        gathered, head, whole = (worst.labelled.get(label, 0) for label in (GATHERED, HEAD, GRADIENTS))
        return TrainerMemory(
            parameters=sum(shard.numel() for shard in shards),
            parameter_bytes=0 if on_host else padded,
            trained_bytes=0 if on_host else trained,
            gradient_bytes=gradients,
            window_gradient_bytes=max(0, whole - gradients),
            optimizer_bytes=0 if on_host else 2 * trained,
            activation_bytes=worst.peak - head - gathered - whole,
            head_bytes=head,
            saved_bytes=worst.saved,
            in_flight=1,
            forward_bytes=max(0, forward_peak - gathered),
            update_bytes=0,
            communication_bytes=gathered,
            teacher_bytes=self._model.teachers.nbytes,
            host_optimizer_bytes=state + 3 * trained if on_host else 0,
            host_frozen_bytes=sum(trained if one else state for one in same),
        )


def _messages(counted: Counted) -> tuple[Traffic, ...]:
    """Return FSDP's messages, which go to all ranks."""
    return counted.work({}, "data", ()).traffic
