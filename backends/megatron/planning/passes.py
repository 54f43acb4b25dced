"""Forward and backward of one rank's chunks over one micro-batch on shapes, traced in the training code, and the
activations that a pipeline stage keeps at the same time under Megatron's schedules."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor

from backends.common.step.shapes import META
from backends.common.step.trace import HEAD, Counted, Trace
from backends.common.trainer.host_memory import HostPool
from backends.megatron import router
from backends.megatron.activations import ActivationOffload, OffloadedTensor
from backends.megatron.head import LogprobModel
from backends.megatron.micro_batch import BatchBuilder, ModelInput
from backends.megatron.versions import Patch, apply_patches
from slime_like.config import TrainerConfig
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import PackedTrajectory

WINDOWS_OF_STAGES = 4
"""Micro-batches in a window, in pipeline sizes: enough for the largest number in flight."""


@dataclass(frozen=True, slots=True)
class PassMemory:
    """Memory of one chunk's pass over one micro-batch, in bytes on top of what was there before.

    Attributes:
        saved: kept from forward to backward.
        forward, backward: peak during each; backward's includes its saved activations.
        head_forward, head_backward: the head's part of these peaks.
    """

    saved: int
    forward: int
    backward: int
    head_forward: int = 0
    head_backward: int = 0


@dataclass(frozen=True, slots=True)
class WindowPeak:
    """The peak of a window: total bytes, the head's part of them, and micro-batches with live activations."""

    nbytes: int
    head: int
    in_flight: int


def schedule(stage: int, stages: int, chunks: int) -> Iterator[tuple[Literal["forward", "backward"], int]]:
    """Yield (pass, chunk) in the order of ``stage``: 1F1B, interleaved if a stage has several chunks.

    Source: Megatron-core's ``pipeline_parallel.schedules`` (Narayanan et al., arXiv:2104.04473, section 2.2).
    """
    micro_batches = WINDOWS_OF_STAGES * stages
    total = micro_batches * chunks
    after = stages - stage - 1
    warmup = min(after if chunks == 1 else after * 2 + (chunks - 1) * stages, total)
    for step in range(total + warmup):
        if step < total:
            yield "forward", _chunk(step, stages, chunks)
        if step >= warmup:
            yield "backward", chunks - 1 - _chunk(step - warmup, stages, chunks)


def _chunk(step: int, stages: int, chunks: int) -> int:
    """Return a step's chunk. A stage runs each chunk for as many micro-batches as there are stages."""
    return step % (stages * chunks) // stages


def window_peak(stage: int, stages: int, passes: Sequence[PassMemory]) -> WindowPeak:
    """Return the peak of a window of equal micro-batches; ``passes`` has one entry per chunk of the stage."""
    peak, live, under_way = WindowPeak(0, 0, 0), 0, 0
    for direction, chunk in schedule(stage, stages, len(passes)):
        chunk_pass = passes[chunk]
        if direction == "forward":
            under_way += 1
            moment = WindowPeak(live + chunk_pass.forward, chunk_pass.head_forward, under_way)
            live += chunk_pass.saved
        else:
            live -= chunk_pass.saved
            moment = WindowPeak(live + chunk_pass.backward, chunk_pass.head_backward, under_way)
            under_way -= 1
        peak = max(peak, moment, key=lambda found: found.nbytes)
    return peak


@dataclass(frozen=True, slots=True)
class ChunkPasses:
    """Passes of one chunk over one micro-batch.

    Attributes:
        memory: memory of training.
        forward_only: peak bytes of a pass without gradients.
        scoring, training: work of a pass without gradients, and of forward, recomputation and backward.
        host_bytes: activations kept in host memory (``trainer.activation_offload``).
    """

    memory: PassMemory
    forward_only: int
    scoring: Counted
    training: Counted
    host_bytes: int


class Passes:
    """Runner of one rank's passes, inside ``alone_as(..., on_meta=True)``.

    Attributes:
        builder: builds this rank's part of a pack.
        standing: bytes of buffers that Megatron creates in its first pass and keeps.
    """

    def __init__(self, trainer: TrainerConfig, dtype: torch.dtype, dimensions: ModelDimensions, trace: Trace) -> None:
        self._trainer, self._dtype, self._trace = trainer, dtype, trace
        self._hidden_size = dimensions.hidden_size
        layout = trainer.parallel
        # An interleaved pipeline keeps its outputs, because it may still be sending them (see model.py).
        self._frees_output = layout.pipeline > 1 and layout.virtual_pipeline == 1
        self._sequence_size = layout.tensor if layout.sequence else 1
        # Boundaries and rows stay real: their values determine shapes.
        self.builder = BatchBuilder(trainer, dtype, dimensions, torch.device("cpu"))
        self.standing = 0

    def run(self, chunk: LogprobModel, wrapped: DistributedDataParallel, pack: PackedTrajectory) -> ChunkPasses:
        """Score ``pack``, then train on it, with one chunk."""
        with apply_patches(*_even_routes()), self._trace.head_labelled(), self._trace:
            before = self._trace.restart()
            with torch.no_grad():
                self._forward(chunk, wrapped, self.builder.build([pack])[0])
                if not chunk.pre_process:
                    chunk.set_input_tensor(None)
            forward_only, scoring = self._trace.peak - before, self._trace.counted
            self.standing += self._trace.live - before
            with wrapped.no_sync():
                memory, training, host = self._train(chunk, wrapped, pack)
        return ChunkPasses(memory, forward_only - self.standing, scoring, training, host)

    def _train(self, chunk: LogprobModel, wrapped: Any, pack: PackedTrajectory) -> tuple[PassMemory, Counted, int]:
        trace = self._trace
        base, host = trace.restart(), _OffloadedShapes([wrapped], HostPool())
        batch = self.builder.build([pack])[0]
        with host.saving() if self._trainer.activation_offload else contextlib.nullcontext():
            output = self._forward(chunk, wrapped, batch)
        shape = output.shape
        if not chunk.post_process:
            deallocate_output_tensor(output, self._frees_output)
        saved, forward, head_forward = trace.live - base, trace.peak - base, trace.peak_labelled.get(HEAD, 0)
        trace.restart_peak()
        self._backward(chunk, output, shape)
        memory = PassMemory(saved, forward, trace.peak - base, head_forward, trace.peak_labelled.get(HEAD, 0))
        return memory, trace.counted, host.nbytes

    def _forward(self, chunk: LogprobModel, wrapped: Any, batch: ModelInput) -> Tensor:
        tokens, positions = batch.shard.tokens.unsqueeze(0), batch.shard.position_ids.unsqueeze(0)
        if not chunk.pre_process:
            rows = tokens.numel() // self._sequence_size
            shape = (rows, 1, self._hidden_size)
            chunk.set_input_tensor(torch.empty(shape, dtype=self._dtype, device=META, requires_grad=True))
        chunk.teachers.add_planned(batch.layout.responses)
        output: Tensor = wrapped(tokens, positions, None, packed_seq_params=batch.layout)
        if not chunk.post_process:
            return output
        return torch.stack(batch.whole(output)).sum()

    def _backward(self, chunk: LogprobModel, output: Tensor, shape: torch.Size) -> None:
        gradient = None if chunk.post_process else torch.empty(shape, dtype=self._dtype, device=META)
        if self._frees_output and not chunk.post_process:
            custom_backward(output, gradient)
        else:
            torch.autograd.backward(output, gradient)
        if not chunk.pre_process:
            chunk.set_input_tensor(None)


class _OffloadedShapes(ActivationOffload):
    """Activation offload on shapes: bytes move from the device's count to the host's."""

    nbytes = 0

    def _stays(self, tensor: Tensor) -> bool:
        return not tensor.is_meta or super()._stays(tensor)

    def _copy(self, tensor: Tensor) -> Any:
        self.nbytes += tensor.nbytes
        return tensor.shape, tensor.stride(), tensor.dtype

    def _fetch(self, saved: OffloadedTensor) -> Tensor:
        shape, stride, dtype = saved.copy
        return torch.empty_strided(shape, stride, dtype=dtype, device=META)


def _even_routes() -> list[Patch]:
    """Route evenly, because shapes have no routes: every expert gets the same number of tokens."""
    routing, gather = router.BalancedRouter.routing, token_dispatcher.gather_from_sequence_parallel_region

    def even(self: Any, logits: Tensor, padding_mask: Any = None) -> tuple[Tensor, Tensor]:
        probs, _ = routing(self, logits, padding_mask)
        return probs, even_routing_map(probs.shape[0], probs.shape[1], self.topk)

    def gather_counts(counts: Tensor, *arguments: Any, group: Any = None, **options: Any) -> Tensor:
        """Gather counts of routes, which determine shapes, as real values; gather everything else as usual."""
        if counts.is_meta:
            return gather(counts, *arguments, group=group, **options)
        return counts.repeat(group.size())

    return [
        Patch(router.BalancedRouter, "routing", even),
        Patch(token_dispatcher, "gather_from_sequence_parallel_region", gather_counts),
    ]


def even_routing_map(tokens: int, experts: int, top_k: int) -> Tensor:
    """Return (tokens, experts) bool: every token has ``top_k`` experts, and experts' loads differ by at most one."""
    routes = torch.zeros(tokens, experts, dtype=torch.bool)
    chosen = torch.arange(tokens * top_k).view(tokens, top_k) % experts
    return routes.scatter_(1, chosen, True)
