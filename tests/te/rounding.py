"""Transformer Engine's tensors in FP8, made and read on a CPU, with one scale per tensor or per block.

The data and the scales have the layouts of the compiled kernels on Hopper, where products read one direction only:
``columnwise`` data is transposed. A scale is the format's largest number over the largest magnitude, rounded down to a
power of two if the quantizer asks for it, and 1 for zeros.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK = 128


def _kind(dtype: Any) -> torch.dtype:
    from transformer_engine.pytorch.constants import TE_DType_To_Torch  # imported after the extension

    return {int(key): value for key, value in TE_DType_To_Torch.items()}[int(dtype)]


def _scales(largest: Tensor, quantizer: Any) -> Tensor:
    largest = largest.clamp_min(quantizer.amax_epsilon)
    scale = torch.where(largest == 0, 1.0, torch.finfo(_kind(quantizer.dtype)).max / largest)
    return torch.exp2(torch.frexp(scale)[1] - 1.0) if quantizer.force_pow_2_scales else scale


def _cast(scaled: Tensor, quantizer: Any) -> Tensor:
    kind = _kind(quantizer.dtype)
    most = torch.finfo(kind).max
    return scaled.clamp(-most, most).to(kind).view(torch.uint8)


def _in_blocks(x: Tensor, down: int, across: int, quantizer: Any) -> tuple[Tensor, Tensor]:
    """Return the rounded (M, K) matrix and the inverse scales of its blocks, (M / down, K / across) rounded up."""
    (rows, columns), high, wide = x.shape, -(-x.shape[0] // down), -(-x.shape[1] // across)
    padded = torch.nn.functional.pad(x, (0, wide * across - columns, 0, high * down - rows))
    blocks = padded.view(high, down, wide, across)
    scale = _scales(blocks.abs().amax((1, 3)), quantizer)
    data = _cast((blocks * scale[:, None, :, None]).view(padded.shape)[:rows, :columns], quantizer)
    return data, 1 / scale


def _filled(inverse: Tensor) -> Tensor:
    """Fill the last axis up to a multiple of four."""
    return torch.nn.functional.pad(inverse, (0, -inverse.shape[-1] % 4)).contiguous()


def quantized(tensor: Tensor, quantizer: Any) -> Any:
    """Return ``tensor`` as ``quantizer`` rounds it, in the directions that it is set to."""
    from transformer_engine.pytorch.dynamo.tensor_spec import TensorSpec

    spec, found = TensorSpec(tuple(tensor.shape), tensor.dtype, quantizer), dict[str, Tensor]()
    x = tensor.detach().float().reshape(-1, tensor.shape[-1])
    if hasattr(quantizer, "block_scaling_dim"):
        square = quantizer.block_scaling_dim == 2
        data, inverse = _in_blocks(x, BLOCK if square else 1, BLOCK, quantizer)
        found["_rowwise_data"], found["_rowwise_scale_inv"] = data, _filled(inverse if square else inverse.t())
        data, inverse = _in_blocks(x, BLOCK, BLOCK if square else 1, quantizer)
        found["_columnwise_data"] = data.t()
        found["_columnwise_scale_inv"] = _filled(inverse.t() if square else inverse)
    else:
        largest = x.abs().amax()
        if quantizer.with_amax_reduction:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=quantizer._canonicalized_amax_reduction_group())
        scale = _scales(largest, quantizer)
        found["_data"] = _cast(x * scale, quantizer)
        found["_transpose"], found["_scale_inv"] = found["_data"].t(), 1 / scale[None]
    parts = []
    for name, (shape, _) in spec.quantizer.inner_tensor_specs(tuple(tensor.shape)).items():
        assert found[name].numel() == torch.Size(shape).numel(), (name, shape, found[name].shape)
        parts.append(found[name].reshape(shape).contiguous())
    return spec.assemble(parts)


def empty(quantizer: Any, shape: list[int], dtype: torch.dtype) -> Any:
    from transformer_engine.pytorch.dynamo.tensor_spec import TensorSpec

    return TensorSpec(tuple(shape), dtype, quantizer, device=torch.device("cpu")).create_tensor()


def matrix(tensor: Any, columnwise: bool) -> Tensor:
    """Return a factor of a product as a float32 matrix, from the data that a product reads in this direction."""
    if isinstance(tensor, Tensor) and not hasattr(tensor, "_quantizer"):
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32)).reshape(-1, tensor.shape[-1])
    if hasattr(tensor, "_scale_inv"):
        data = tensor._transpose if columnwise else tensor._data
        assert not (columnwise and tensor._transpose_invalid)
        values = _values(data, tensor._fp8_dtype, columnwise) * tensor._scale_inv
        return values.t() if columnwise else values
    name = "columnwise" if columnwise else "rowwise"
    values = _values(getattr(tensor, f"_{name}_data"), tensor._fp8_dtype, columnwise)
    inverse = getattr(tensor, f"_{name}_scale_inv")
    if tensor._is_2D_scaled:
        inverse = inverse.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    else:  # (blocks, rows), where columnwise data has as many rows as the tensor has columns
        inverse = inverse.t().repeat_interleave(BLOCK, 1)
    values = values * inverse[: values.shape[0], : values.shape[1]]
    return values.t() if columnwise else values


def _values(data: Tensor, dtype: Any, columnwise: bool) -> Tensor:
    flat = data.reshape(data.shape[0], -1) if columnwise else data.reshape(-1, data.shape[-1])
    return flat.view(_kind(dtype)).float()
