"""Interface of estimates: memory, work and traffic of a rank, as a trainer backend knows them before a run."""

from dataclasses import dataclass
from typing import Literal

Axis = Literal["tensor", "pipeline", "context", "data", "expert", "embedding", "world"]
Pattern = Literal["all_reduce", "gather", "all_to_all", "message"]
"""How a group exchanges: ring all-reduces; all-gathers, reduce-scatters and broadcasts; all pairs; one neighbor."""


@dataclass(frozen=True, slots=True)
class RankKind:
    """Ranks with the same contents and work. The first one is estimated on behalf of all.

    Attributes:
        name: what distinguishes them, e.g. "stage 1 of 4".
        ranks: their numbers in layout order; ``ranks[0]`` needs the most if rounding makes a difference.
    """

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages from one rank to its group.

    Attributes:
        axis: the group's parallel axis.
        ranks: the group's members; the link depends on which of them share a node.
        nbytes: bytes that leave this rank (a ring all-reduce of n bytes over k ranks sends 2 n (k - 1) / k).
        calls: number of messages or collectives.
        hidden_bytes: the part of ``nbytes`` whose collectives overlap with a matrix product.
        pattern: how the group exchanges them.
    """

    axis: Axis
    ranks: tuple[int, ...]
    nbytes: int
    calls: int
    hidden_bytes: int = 0
    pattern: Pattern = "gather"


@dataclass(frozen=True, slots=True)
class Work:
    """Computation and messages of one rank for one pass.

    Attributes:
        matmul_flops: FLOPs of matrix products, 2 m n k each; proportional to the tokens.
        attention_flops: FLOPs of causal attention; proportional to the tokens times the sequences' length.
        traffic: messages sent during the pass.
        kernel_bytes: bytes read and written by all other kernels, counted per kernel; proportional to the tokens.
        head_flops: the head's part of ``matmul_flops``.
        grouped_flops: further FLOPs of experts' grouped products, with each expert's rows rounded up to whole tiles.
        kernels: number of kernels launched.
        fp8_share: share of ``matmul_flops`` without the head's that is in FP8.
    """

    matmul_flops: float
    attention_flops: float
    traffic: tuple[Traffic, ...] = ()
    kernel_bytes: float = 0.0
    head_flops: float = 0.0
    grouped_flops: float = 0.0
    kernels: int = 0
    fp8_share: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """One rank's memory, in bytes. Device memory unless stated otherwise.

    Attributes:
        parameters: number of this rank's parameters, including padding.
        parameter_bytes: parameter storage.
        trained_bytes: the part of it that training changes: all of it, or the low-rank factors.
        gradient_bytes: gradient storage, for the length of a run (offloading empties it).
        window_gradient_bytes: further gradients at training's peak: whole gradients before the sum over ranks, and
            their messages.
        optimizer_bytes: main weights and moments on the device, after the first update.
        activation_bytes: peak of temporaries and activations kept for backward, over a window of worst micro-batches,
            without the head.
        head_bytes: what the head adds at that peak.
        saved_bytes: activations that one micro-batch keeps between its forward and its backward.
        in_flight: micro-batches (of all chunks) whose activations are kept at the same time.
        forward_bytes: like ``activation_bytes``, but with the head and without gradients, on top of
            ``communication_bytes``.
        update_bytes: temporaries of the optimizer's step.
        communication_bytes: permanent buffers of the framework's collectives, and whole weights gathered at training's
            peak.
        teacher_bytes: the teacher's output projection, for exact distillation.
        host_optimizer_bytes, host_frozen_bytes, host_activation_bytes: kept in host memory instead.
    """

    parameters: int
    parameter_bytes: int
    trained_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    head_bytes: int
    saved_bytes: int
    in_flight: int
    forward_bytes: int
    update_bytes: int
    communication_bytes: int = 0
    window_gradient_bytes: int = 0
    teacher_bytes: int = 0
    host_optimizer_bytes: int = 0
    host_frozen_bytes: int = 0
    host_activation_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """A backend's estimate of one rank.

    Attributes:
        rank: the estimated rank.
        memory: its memory.
        forward: one worst micro-batch without gradients, all chunks of the rank.
        training: forward, recomputation and backward of one worst micro-batch, all chunks of the rank.
        update: added once per optimizer step, whatever the number of micro-batches.
        longest: tokens of that micro-batch's longest sequence, which ``attention_flops`` assumes; for a pack with
            shared prefixes, the length of sequences with the same cost per token.
        communicators: groups of several ranks that include this rank; NCCL has buffers for each.
        layers: the implementation of the layers that was estimated, e.g. "local layers, ring attention".
    """

    rank: int
    memory: TrainerMemory
    forward: Work
    training: Work
    update: Work
    longest: int
    communicators: int
    layers: str
