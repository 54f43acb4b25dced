"""All adaptations of Megatron-core to machines without CUDA. They are active only there.

Megatron-core computes on any device, but uses CUDA in fixed places: the current device, streams, the tracker of random
states, and literal ``device="cuda"``. ``megatron_runtime`` redirects these to an available device inside a ``with``
block, and restores the originals afterwards. If CUDA is available, it does nothing.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch.distributed import distributed_c10d
from torch.jit._builtins import _find_builtin, _register_builtin
from torch.utils._device import _device_constructors

from backends.megatron.versions import Patch, apply_patches
from slime_like.errors import TrainerError


def device_patches(target: str) -> list[Patch]:
    """Redirect Megatron's CUDA calls to ``target``, "cpu" or "meta"."""
    cuda = torch.cuda
    return [
        Patch(cuda, "current_device", lambda: torch.device("meta") if target == "meta" else torch.cpu.current_device()),
        Patch(cuda, "synchronize", lambda *device: synchronized()),
        *(Patch(cuda, name, _Done) for name in ("Stream", "Event", "current_stream", "default_stream")),
        Patch(cuda, "stream", contextlib.nullcontext),
        *_literal_patches(target),
    ]


# ------------------------------------------------------------------------------------------------ device and streams
def synchronized() -> None:
    """Do nothing, where the host of a GPU would wait for it."""


class _Done:
    """A finished stream or event: the CPU runs operations in program order."""

    def __init__(self, *unused: Any, **options: Any) -> None:
        pass

    wait_stream = wait_event = record = wait = __init__

    def synchronize(self) -> None:
        synchronized()

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Done()


# ------------------------------------------------------------------------------------------- literal CUDA devices
_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace"),
    *("ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor"),
    *("zeros", "zeros_like"),
)
_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "to")


def _literal_patches(target: str) -> list[Patch]:
    """Convert ``device="cuda"``, ``Tensor.cuda()`` and pinned memory to their equivalents on ``target``.

    Functions are replaced in the places where Megatron looks them up. A ``TorchFunctionMode`` would see every
    operation, but add some microseconds to each: 3 % of a small model's forward and backward.
    """
    # Code that records functions on first use must see the originals.
    _device_constructors()  # the functions that ``with torch.device(...)`` applies to
    redirected = functools.partial(_redirected, target=torch.device(target))
    factories = [Patch(torch, name, redirected(getattr(torch, name))) for name in _FACTORIES]
    methods = [Patch(torch.Tensor, name, redirected(getattr(torch.Tensor, name))) for name in _METHODS]
    moves = ("cuda", "pin_memory", "record_stream")
    stays = [Patch(torch.Tensor, name, lambda tensor, *_, **__: tensor) for name in moves]
    return [*factories, *methods, *stays, Patch(torch.Tensor, "type", _type_on_cuda)]


def _redirected(make: Callable[..., Any], target: torch.device) -> Callable[..., Any]:
    """Wrap ``make``: replace any CUDA device in its arguments by ``target``, and drop pinned memory."""

    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = target
            kwargs.pop("pin_memory", None)
        if any(map(_is_cuda, args)):
            args = tuple(target if _is_cuda(value) else value for value in args)
        return make(*args, **kwargs)

    if (operator := _find_builtin(make)) is not None:
        _register_builtin(call, operator)  # so that torch.jit.script still compiles whatever is imported meanwhile
    return call


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


def _type_on_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return CUDA type names: Megatron's optimizer accepts parameters by type name ("torch.cuda.FloatTensor")."""
    found = _TYPE(tensor, *args, **kwargs)
    if not isinstance(found, str) or found.startswith("torch.cuda."):
        return found
    return found.replace("torch.", "torch.cuda.", 1).replace("cuda.meta.", "cuda.", 1)


_TYPE = torch.Tensor.type


@contextlib.contextmanager
def megatron_runtime(on_meta: bool = False) -> Iterator[None]:
    """Wrap everything in which Megatron-core builds, steps and checkpoints on this machine. May be nested.

    Args:
        on_meta: GPU tensors become shapes only, on every machine, even one with CUDA.
    """
    with apply_patches(*(_patches(on_meta) if on_meta or not torch.cuda.is_available() else ())):
        yield


@functools.cache
def _patches(on_meta: bool) -> tuple[Patch, ...]:
    return (
        *device_patches("meta" if on_meta else "cpu"),
        Patch(random, "CudaRNGStatesTracker", CpuRngStatesTracker),
        Patch(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        Patch(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        Patch(p2p_communication, "_batched_p2p_ops", _tagged_p2p_ops),
        # The router reads it, but it is bound only if Transformer Engine can be imported.
        Patch(moe_utils, "te_general_gemm", None, adds=True),
        Patch(
            token_dispatcher,
            "maybe_move_tensor_to_cpu",
            lambda x, as_numpy=False, **_: x.numpy() if as_numpy and isinstance(x, torch.Tensor) else x,
        ),
        *(Patch(fused_bias_swiglu, name, getattr(fused_bias_swiglu, name).__wrapped__) for name in _COMPILED),
        Patch(fused_bias_swiglu, "swiglu_back", _swiglu_back),
        Patch(param_and_grad_buffer, "_coalescing_manager", _coalescing_manager),
        *(
            Patch(param_and_grad_buffer, name, _unless_alone(getattr(param_and_grad_buffer, name)))
            for name in ("dist_all_gather_func", "dist_reduce_scatter_func")
        ),
        Patch(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", _all_on_host),
    )


_COMPILED = ("swiglu", "weighted_swiglu", "weighted_swiglu_back")
"""SwiGLU operators that torch compiles within seconds for a GPU. For a CPU this takes half a minute and a compiler."""


def _coalescing_manager(group: dist.ProcessGroup, async_ops: bool = False) -> Any:
    if group.size() == 1:
        return contextlib.nullcontext(distributed_c10d._CoalescingManager())
    return distributed_c10d._coalescing_manager(group, async_ops=async_ops)


def _unless_alone(collective: Any) -> Any:
    """Skip ``collective`` for a single rank, whose part is the whole. Gloo would copy it twice."""

    def call(*tensors: torch.Tensor, group: dist.ProcessGroup, **options: Any) -> Any:
        return None if group.size() == 1 else collective(*tensors, group=group, **options)

    return call


def _swiglu_back(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of ``silu(gate) * up`` in place in three passes. Megatron's, uncompiled, takes ten."""
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty_like(gate_up)
    gate_grad, up_grad = out.chunk(2, dim=-1)
    torch.mul(torch.nn.functional.silu(gate), grad, out=up_grad)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=gate_grad)
    return out


class CpuRngStatesTracker(random.CudaRNGStatesTracker):
    """Megatron's tracker of named random states, kept on the CPU generator."""

    def add(self, name: str, seed: int) -> None:
        if seed in self.seeds_ or name in self.states_:
            problem = f"random state {name!r} or seed {seed} is added twice"
            raise TrainerError(problem, code="random-state-twice", who="cpu_runtime")
        self._is_initialized = True
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


_ACTIVATION_TAG, _GRADIENT_TAG = 1, 2


def _tagged_p2p_ops(
    *, group: dist.ProcessGroup, prev_pipeline_rank: int, next_pipeline_rank: int, **tensors: torch.Tensor | None
) -> list[Any]:
    """Create Megatron's batched messages, with one tag per direction.

    With two stages, each is both the next and the previous one of the other. Without tags, an activation and a gradient
    in one batch could be mistaken for each other.
    """
    messages = (
        (dist.isend, tensors["tensor_send_prev"], prev_pipeline_rank, _GRADIENT_TAG),
        (dist.irecv, tensors["tensor_recv_prev"], prev_pipeline_rank, _ACTIVATION_TAG),
        (dist.isend, tensors["tensor_send_next"], next_pipeline_rank, _ACTIVATION_TAG),
        (dist.irecv, tensors["tensor_recv_next"], next_pipeline_rank, _GRADIENT_TAG),
    )
    operations = [
        dist.P2POp(operation, tensor, peer, group, tag)
        for operation, tensor, peer, tag in messages
        if tensor is not None
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def _all_on_host(self: Any, offload_fraction: float) -> tuple[Any, ...]:
    """Assign all parameters to the host if their "device" is the CPU.

    Megatron's method creates host copies only for parameters on a CUDA device. Its step looks up the others' copies
    anyway, and raises KeyError.
    """
    copies = {
        parameter: parameter.detach().clone().float() for group in self.param_groups for parameter in group["params"]
    }
    groups = [{**group, "params": [copies[p] for p in group["params"]]} for group in self.param_groups]
    widened = {parameter: copy for parameter, copy in copies.items() if parameter.dtype != torch.float32}
    return [g for g in groups if g["params"]], [], copies, {copy: p for p, copy in copies.items()}, widened
