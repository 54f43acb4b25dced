"""The border to whatever a trainer backend knows before it runs: memory, work and traffic of a rank. Sizes only."""

from dataclasses import dataclass
from typing import Literal

Axis = Literal["tensor", "pipeline", "context", "data", "expert", "embedding", "world"]


@dataclass(frozen=True, slots=True)
class RankKind:
    """Ranks that hold and do the same; the first one is estimated for all.

    Attributes:
        name: what sets them apart, e.g. "stage 1 of 4".
        ranks: theirs, in the order of the layout; ``ranks[0]`` needs the most of them, where rounding makes a
            difference.
    """

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages of one rank to its group.

    Attributes:
        axis: the parallel axis the group belongs to.
        ranks: the group's members; which of them share a node decides the link.
        nbytes: bytes that leave this rank (a ring all-reduce of n bytes over k ranks sends 2 n (k - 1) / k).
        calls: messages or collectives.
        hidden_bytes: of these bytes, those of collectives that run beside a matrix product.
    """

    axis: Axis
    ranks: tuple[int, ...]
    nbytes: int
    calls: int
    hidden_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """Computation and messages of one rank, once.

    Attributes:
        matmul_flops: of matrix products, 2 m n k each; they grow with the tokens.
        attention_flops: of causal attention; they grow with the tokens times the sequences' length.
        traffic: what it sends meanwhile.
        kernel_bytes: read and written by all other kernels, each on its own; they grow with the tokens.
        head_flops, head_bytes: of ``matmul_flops`` and ``kernel_bytes``, the head's.
    """

    matmul_flops: float
    attention_flops: float
    traffic: tuple[Traffic, ...] = ()
    kernel_bytes: float = 0.0
    head_flops: float = 0.0
    head_bytes: float = 0.0

    @property
    def flops(self) -> float:
        return self.matmul_flops + self.attention_flops


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """One rank's memory, in bytes. Device memory unless said otherwise.

    Attributes:
        parameters: number of this rank's parameters, padding included.
        parameter_bytes: their storage.
        gradient_bytes: gradient storage, for the length of a run (offloading empties it).
        window_gradient_bytes: further gradients at training's highest moment: whole ones before they are summed over
            ranks, and their messages.
        optimizer_bytes: main weights and moments on the device, after the first update.
        activation_bytes: largest sum of what forward keeps for backward and of temporaries, over a window of worst
            micro-batches, apart from the head's.
        head_bytes: what the head adds at that moment.
        saved_bytes: activations that one micro-batch keeps between its forward and its backward.
        in_flight: micro-batches (of all chunks) whose activations are kept at once.
        forward_bytes: as ``activation_bytes``, head included, in a pass without gradients, above
            ``communication_bytes``.
        update_bytes: temporaries of the optimizer's step.
        communication_bytes: standing buffers of collectives that the framework itself makes; whole weights that it
            has gathered at training's highest moment.
        host_optimizer_bytes, host_reference_bytes, host_activation_bytes: what is kept in host memory instead.
    """

    parameters: int
    parameter_bytes: int
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
    host_optimizer_bytes: int = 0
    host_reference_bytes: int = 0
    host_activation_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """A backend's estimate of one rank.

    Attributes:
        rank: whose.
        memory: what it needs.
        forward: one worst micro-batch without gradients, all chunks of the rank.
        training: forward, recomputation and backward of one worst micro-batch, all chunks of the rank.
        update: what an optimizer step adds once, whatever the number of micro-batches.
        micro_batch_tokens: tokens of that micro-batch, over all context ranks.
        longest: its longest sequence, in tokens, to which ``attention_flops`` belong; of a pack that shares prefixes,
            the length of sequences that would cost as much per token.
        communicators: groups of several ranks that the rank is in; NCCL has buffers for each.
        layers: which implementation of the layers this is true of, e.g. "local layers, ring attention".
    """

    rank: int
    memory: TrainerMemory
    forward: Work
    training: Work
    update: Work
    micro_batch_tokens: int
    longest: int
    communicators: int
    layers: str
