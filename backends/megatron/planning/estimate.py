"""Estimate of one rank on GPUs, without GPUs: its real shard, DDP and optimizer on shapes, and a traced step."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from torch import Tensor

from backends.common.process.rendezvous import communicators
from backends.common.step.teacher import Teachers
from backends.common.step.trace import Counted, Trace
from backends.common.step.worst_batch import attention_length, worst_packs
from backends.megatron.attention import Attention, attention_of, context_layout_of
from backends.megatron.model import build_meta_chunks
from backends.megatron.optimizer import Optimizer, wrap_for_data_parallel
from backends.megatron.parallel import alone_as
from backends.megatron.planning.fp8 import with_fp8_products
from backends.megatron.planning.passes import ChunkPasses, Passes, WindowPeak, window_peak
from backends.megatron.schedule import Communication
from slime_like.config import RunConfig, TrainerConfig
from slime_like.config.roles import POLICY, ModelRole
from slime_like.interfaces.estimate import Axis, RankEstimate, RankKind, Traffic, TrainerMemory
from slime_like.models.dimensions import ModelDimensions

_HOST_COPIES = 4
"""float32 copies of every parameter updated in host memory: main weight, gradient, both moments."""


def rank_kinds(trainer: TrainerConfig) -> list[RankKind]:
    """Group ranks by pipeline stage: stages differ in layers, ends, and micro-batches in flight.

    The last context rank comes first: if keys are gathered, it keeps most of them.
    """
    layout = trainer.parallel
    size = layout.tensor * layout.context * layout.data
    kinds = []
    for stage in range(layout.pipeline):
        ranks = list(range(stage * size, (stage + 1) * size))
        ranks.insert(0, ranks.pop(layout.tensor * (layout.context - 1)))
        kinds.append(RankKind(f"stage {stage + 1} of {layout.pipeline}", tuple(ranks)))
    return kinds


def planned_attention(trainer: TrainerConfig, dimensions: ModelDimensions) -> Attention:
    """Return the traced attention. Transformer Engine's layers need CUDA, so ours represent them."""
    asked = "auto" if trainer.attention == "transformer_engine" else trainer.attention
    return attention_of(trainer.model_copy(update={"attention": asked}), dimensions, on_cuda=False)


def estimate(config: RunConfig, rank: int, role: str = POLICY) -> RankEstimate:
    """See ``slime_like.interfaces.Planner.estimate``."""
    dimensions = ModelDimensions.from_checkpoint(config.model.path, config.roles[role].head == "value")
    trainer = config.trainer.model_copy(update={"attention": planned_attention(config.trainer, dimensions)})
    local = config.model_copy(update={"trainer": trainer})
    with alone_as(trainer, rank, on_meta=True):
        return _Rank(local, local.roles[role], dimensions).estimate(rank)


class _Rank:
    """This process acting as one rank, on shapes."""

    def __init__(self, config: RunConfig, role: ModelRole, dimensions: ModelDimensions) -> None:
        self._held = config.roles.held if role.name == POLICY else []
        self._config = config
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._dimensions = dimensions
        self._chunks = build_meta_chunks(
            config.model, config.trainer, self._dimensions, config.algorithm.entropy_coef > 0
        )
        for chunk in self._chunks:
            chunk.teachers = Teachers()
            if role.name == POLICY and chunk.post_process:
                chunk.teachers = Teachers.planned(config.distillation, len(chunk.output_weight()), self._dtype)
        self._wrapped = wrap_for_data_parallel(config.trainer.optimizer, self._chunks)
        self._optimizer = Optimizer(config.trainer.optimizer, config.total_updates, self._wrapped)
        self._communication = Communication(self._wrapped)
        self._communication.attach()
        self._trace = Trace()
        with self._trace:
            self._communication.settle_weights()  # otherwise the first forward pass would do so

    def estimate(self, rank: int) -> RankEstimate:
        passes = Passes(self._config.trainer, self._dtype, self._dimensions, self._trace)
        attention = planned_attention(self._config.trainer, self._dimensions)
        chunks = list(zip(self._chunks, self._wrapped, strict=True))
        packs = worst_packs(self._config, context_layout_of(attention))
        per_pack = [[passes.run(chunk, wrapped, pack) for chunk, wrapped in chunks] for pack in packs]
        stage, stages = parallel_state.get_pipeline_model_parallel_rank(), self._config.trainer.parallel.pipeline
        peaks = [window_peak(stage, stages, [chunk.memory for chunk in found]) for found in per_pack]
        worst = max(range(len(packs)), key=lambda index: peaks[index].nbytes)
        largest, pack = per_pack[worst], packs[worst]
        update, update_bytes = self._update()
        handed_on = self._handed_on(pack.packed_seq_len - pack.shared_tokens)
        memory = self._memory(per_pack, worst, peaks[worst], passes.standing, update_bytes)
        forward = _total(part.scoring for part in largest).work(_axes(), "world", handed_on[:1])
        training = _total(part.training for part in largest).work(_axes(), "world", handed_on)
        if self._config.trainer.fp8 != "none":
            tokens = passes.builder.build([pack])[0].shard.tokens.numel()
            memory, forward, training = with_fp8_products(
                self._chunks, self._config.trainer, tokens, memory, forward, training
            )
        return RankEstimate(
            rank=rank,
            memory=memory,
            forward=forward,
            training=training,
            update=update.work(_axes(_replicas()), "world", ()),
            longest=attention_length(pack),
            communicators=communicators(),
            layers=f"local layers, {attention} attention" + ", FP8 products" * (forward.fp8_share > 0),
        )

    def _memory(
        self, per_pack: Sequence[Sequence[ChunkPasses]], worst: int, peak: WindowPeak, standing: int, update_bytes: int
    ) -> TrainerMemory:
        """Sum up the memory. ``per_pack[worst]`` needs most in training; another pack may in scoring."""
        passes = per_pack[worst]
        held = _count_memory(self._chunks, self._wrapped, self._optimizer)
        same = [self._config.has_same_base(role) for role in self._held]
        return TrainerMemory(
            **held,
            activation_bytes=peak.nbytes - peak.head,
            head_bytes=peak.head,
            saved_bytes=sum(chunk.memory.saved for chunk in passes),
            in_flight=peak.in_flight,
            forward_bytes=max(chunk.forward_only for found in per_pack for chunk in found),
            update_bytes=update_bytes,
            communication_bytes=standing,
            teacher_bytes=sum(chunk.teachers.nbytes for chunk in self._chunks),
            host_frozen_bytes=sum(held["trained_bytes" if one else "parameter_bytes"] for one in same),
            host_activation_bytes=peak.in_flight * max(chunk.host_bytes for chunk in passes),
        )

    def _update(self) -> tuple[Counted, int]:
        """Trace once the sums over replicas, the optimizer's step, and the gathering of sharded weights."""
        trace = self._trace
        trace.restart()
        with trace, torch.no_grad():
            finalize_model_grads(self._wrapped, None)
            summed = trace.peak - trace.live
            trace.restart_peak()
            for chunk in self._wrapped:
                chunk.zero_grad_buffer()
            if self._config.trainer.optimizer.offload:
                # The processor does its arithmetic; its memory is counted from its parameters.
                for chunk in self._wrapped:
                    chunk.start_param_sync(force_sync=True)
                return trace.counted, 0
            for part in self._optimizer.parts:
                part.optimizer.step = partial(_make_moments, part.optimizer)
            self._optimizer.megatron.prepare_grads()
            self._optimizer.megatron.step_with_ready_grads()
            self._communication.settle_weights()
        return trace.counted, max(summed, trace.peak - trace.live)

    def _handed_on(self, tokens: int) -> tuple[Traffic, ...]:
        """Return hidden states sent to the next stage and gradients to the previous one. The schedule, which sends
        them, is not traced."""
        layout, chunks = self._config.trainer.parallel, len(self._chunks)
        if layout.pipeline == 1:
            return ()
        ranks = tuple(torch.distributed.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group()))
        rows = -(-tokens // (layout.context * (layout.tensor if layout.sequence else 1)))
        nbytes = rows * self._dimensions.hidden_size * self._dtype.itemsize
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        forwards, backwards = chunks - int(last), chunks - int(first)
        return tuple(
            Traffic("pipeline", ranks, nbytes * times, times, pattern="message") for times in (forwards, backwards)
        )


def _count_memory(chunks: Sequence[Any], wrapped: Sequence[Any], optimizer: Optimizer) -> dict[str, int]:
    """Count one rank's memory after the optimizer's first step."""
    weights = [parameter for chunk in chunks for parameter in chunk.parameters()]
    gradients = [buffer.grad_data for chunk in wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    parts = [part.optimizer for part in optimizer.parts]
    on_host = [part for part in parts if isinstance(part, HybridDeviceOptimizer)]
    on_device = [part for part in parts if part not in on_host]
    states = [tensor for part in on_device for tensor in _parameters(part)]
    # A state is moments, and the step's number, one scalar per parameter, which does not count.
    moments = (state.items() for part in on_device for state in part.state.values())
    states += [value for each in moments for name, value in each if isinstance(value, Tensor) and name != "step"]
    numel = sum(parameter.numel() for part in on_host for parameter in _parameters(part))
    return {
        "parameters": sum(parameter.numel() for parameter in weights),
        "parameter_bytes": _storage_bytes(weights),
        "trained_bytes": _storage_bytes(weight for weight in weights if weight.requires_grad),
        "gradient_bytes": _storage_bytes(gradients),
        "optimizer_bytes": _storage_bytes(states, without=weights),
        "host_optimizer_bytes": numel * 4 * _HOST_COPIES,
    }


def _storage_bytes(tensors: Iterable[Tensor], without: Iterable[Tensor] = ()) -> int:
    """Return the bytes of the tensors' storages, each once, except storages shared with ``without``."""
    known = {tensor.untyped_storage()._cdata for tensor in without}
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(nbytes for key, nbytes in found.items() if key not in known)


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _make_moments(adamw: torch.optim.Optimizer) -> None:
    """Create the moments of a first step, for shapes. Fused AdamW does not accept shapes, and has no temporaries."""
    for group in adamw.param_groups:
        for parameter in group["params"]:
            adamw.state[parameter] = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}


def _total(chunks: Iterable[Counted]) -> Counted:
    total = Counted()
    for chunk in chunks:
        total.add(chunk)
    return total


def _axes(last: Sequence[tuple[Axis, Any]] = ()) -> dict[tuple[int, ...], Axis]:
    """Return each group's axis; of several with the same ranks, the last one counts."""
    state = parallel_state
    groups: list[tuple[Axis, Any]] = [
        ("world", torch.distributed.group.WORLD),
        ("embedding", state.get_embedding_group(check_initialized=False)),
        *_replicas(),
        ("pipeline", state.get_pipeline_model_parallel_group()),
        ("expert", state.get_expert_tensor_and_model_parallel_group()),
        ("expert", state.get_expert_model_parallel_group()),
        ("context", state.get_context_parallel_group()),
        ("tensor", state.get_tensor_model_parallel_group()),
        *last,
    ]
    return {
        tuple(torch.distributed.get_process_group_ranks(group)): axis for axis, group in groups if group is not None
    }


def _replicas() -> list[tuple[Axis, Any]]:
    """Return the groups over which gradients are summed and optimizer state is sharded."""
    state = parallel_state
    return [
        ("data", state.get_data_parallel_group(with_context_parallel=False)),
        ("data", state.get_data_parallel_group(with_context_parallel=True)),
        ("data", state.get_expert_data_parallel_group()),
    ]
