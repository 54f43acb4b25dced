"""RMSNorm for Megatron's layer specs: computes in fp32, keeps the model's dtype, and supports sequence parallelism."""

from typing import Any

import torch
from torch import Tensor


def _has_fused(x: Tensor) -> bool:
    """Return whether torch has one-pass forward and backward for the norm: on a GPU, which shapes represent."""
    return not x.is_cpu


class _RMSNormFunction(torch.autograd.Function):
    """y = x / rms(x) * weight over the last axis, with the statistics and products in fp32 (or wider)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if _has_fused(x):
            normed, rstd = torch.ops.aten._fused_rms_norm(x, x.shape[-1:], None, eps)
        else:
            wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
            rstd = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
            normed = (wide * rstd).to(weight.dtype)
        ctx.save_for_backward(x, weight, rstd)
        # Hugging Face rounds before it multiplies by a weight of x's type. The same rounding keeps both models alike.
        return (normed.mul_(weight) if normed.dtype == weight.dtype else normed * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight, rstd = ctx.saved_tensors
        if _has_fused(x):
            backward = torch.ops.aten._fused_rms_norm_backward
            return *backward(
                grad.contiguous(), x.contiguous(), x.shape[-1:], rstd, weight.to(x.dtype), [True, True]
            ), None
        grad = grad.to(rstd.dtype)
        normed = x.to(rstd.dtype) * rstd
        product = grad * normed
        weight_grad = product.view(-1, x.shape[-1]).sum(0)
        wide_weight = weight.to(rstd.dtype)
        projection = (product @ wide_weight).div_(x.shape[-1]).unsqueeze(-1)
        x_grad = torch.mul(grad, wide_weight, out=product).addcmul_(normed, projection, value=-1).mul_(rstd)
        return x_grad.to(x.dtype), weight_grad.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize (..., hidden_size), keeping shape and dtype, and multiply by a weight of the same or a wider type."""
    return _RMSNormFunction.apply(x, weight, eps)


class RMSNorm(torch.nn.Module):
    """Root mean square normalization (https://arxiv.org/abs/1910.07467, eq. 4) over the last axis.

    Megatron reduces the gradient of a weight marked ``sequence_parallel`` over the tensor-parallel group.

    Attributes:
        is_centered: the factor is 1 plus the weight, in fp32.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.eps = eps
        self.is_centered: bool = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (..., hidden_size), keeping shape and dtype."""
        return rms_norm(x, 1 + self.weight.float() if self.is_centered else self.weight, self.eps)
