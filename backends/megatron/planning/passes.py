"""Forward and backward of one rank's chunks over one micro-batch on shapes, traced in the training code."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor

from backends.common.step.shapes import META
from backends.common.step.trace import HEAD, Counted, Trace
from backends.common.trainer.host_memory import HostPool
from backends.megatron import router
from backends.megatron.activations import ActivationOffload, Saved
from backends.megatron.head import LogprobModel
from backends.megatron.installed import Patch, applied
from backends.megatron.micro_batch import BatchBuilder, ModelInput
from backends.megatron.planning.in_flight import PassMemory
from slime_like.config import TrainerConfig
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import PackedTrajectory


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
        self._builder = BatchBuilder(trainer, dtype, dimensions, torch.device("cpu"))
        self.standing = 0

    def run(self, chunk: LogprobModel, wrapped: DistributedDataParallel, pack: PackedTrajectory) -> ChunkPasses:
        """Score ``pack``, then train on it, with one chunk."""
        with self._followed():
            before = self._trace.live
            forward_only, scoring = self._score(chunk, wrapped, pack)
            self.standing += self._trace.live - before
            with wrapped.no_sync():
                memory, training, host = self._train(chunk, wrapped, pack)
        return ChunkPasses(memory, forward_only - self.standing, scoring, training, host)

    @contextlib.contextmanager
    def _followed(self) -> Iterator[None]:
        with applied(*_even_routes()), self._trace.head_labelled(), self._trace:
            yield

    @torch.no_grad()
    def _score(self, chunk: LogprobModel, wrapped: Any, pack: PackedTrajectory) -> tuple[int, Counted]:
        base = self._trace.restart()
        batch = self._builder.build([pack])[0]
        self._forward(chunk, wrapped, batch)
        if not chunk.pre_process:
            chunk.set_input_tensor(None)
        return self._trace.peak - base, self._trace.counted

    def _train(self, chunk: LogprobModel, wrapped: Any, pack: PackedTrajectory) -> tuple[PassMemory, Counted, int]:
        trace = self._trace
        base, host = trace.restart(), _OffloadedShapes([wrapped], HostPool())
        batch = self._builder.build([pack])[0]
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

    def _fetch(self, saved: Saved) -> Tensor:
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
