"""8-bit weights in the format of DeepSeek-V3's checkpoints, which engines load (arXiv:2412.19437, section 3.3).

A matrix has elements in float8_e4m3fn, and one float32 scale for each block of 128 x 128, in a tensor with the suffix
``_scale_inv``. The scale is the block's largest magnitude over 448, and an element is multiplied by it when it is read.
The elements of the last blocks of a row or column may be fewer.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from slime_like.interfaces import WeightBucket, WeightExport
from slime_like.interfaces.conversion import TensorInfo
from slime_like.interfaces.weights import Manifest, dtype_name
from slime_like.models.tower import own_name

BLOCK = 128
FORMAT = torch.float8_e4m3fn

_FINFO = torch.finfo(FORMAT)
_BAND = 4 * BLOCK
"""Rows rounded at a time, because temporary copies in float32 take several times the matrix's memory."""
_LEAST_SCALE = torch.finfo(torch.float32).tiny
_SUFFIX = "_scale_inv"
_MATRIX = re.compile(r"model\.layers\.\d+\..*_proj(_with_mqa)?\.weight")
"""Linear layers of attention, MLPs and experts, by their names without a vision tower. Embeddings, head, norms, routers
and the projections into gated delta nets keep their type."""

Shape = tuple[int, ...]
Named = Iterable[tuple[str, Tensor]]


def is_quantized(name: str, shape: Shape) -> bool:
    """Return whether the Hugging Face tensor, under its stored name, is sent in 8 bits."""
    return len(shape) == 2 and _MATRIX.fullmatch(own_name(name) or name) is not None


def with_scales(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Add the shapes of the scales, (rows / 128, columns / 128) rounded up, to the shapes of a model's tensors."""
    grids = {f"{name}{_SUFFIX}": _grid(shape) for name, shape in shapes.items() if is_quantized(name, shape)}
    return {**shapes, **grids}


def checkpoint_settings(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return ``quantization_config`` of the ``config.json`` of such a checkpoint, given all its tensors."""
    kept = [name for name, shape in shapes.items() if len(shape) == 2 and not is_quantized(name, shape)]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(name.removesuffix(".weight") for name in kept),
    }


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix to 8 bits, to the nearest and on ties to the even value.

    Returns:
        Elements (rows, columns) float8_e4m3fn, and scales (rows / 128, columns / 128) float32, rounded up. A block of
        zeros has scale 1. No scale is denormal, because devices may read such a scale as 0.
    """
    weight = weight.detach()
    elements = torch.empty(weight.shape, dtype=FORMAT, device=weight.device)
    scales = torch.empty(_grid(tuple(weight.shape)), device=weight.device)
    bands = zip(weight.split(_BAND), elements.split(_BAND), scales.split(_BAND // BLOCK), strict=True)
    for source, target, grid in bands:
        (rows, columns), (down, across) = source.shape, grid.shape
        padded = torch.nn.functional.pad(source.float(), (0, across * BLOCK - columns, 0, down * BLOCK - rows))
        blocks = padded.view(down, BLOCK, across, BLOCK)
        largest = blocks.abs().amax((1, 3))
        grid.copy_(torch.where(largest == 0, 1.0, (largest / _FINFO.max).clamp_min(_LEAST_SCALE)))
        target.copy_((blocks / grid[:, None, :, None]).view(padded.shape)[:rows, :columns])
    return elements, scales


def dequantize(elements: Tensor, scales: Tensor) -> Tensor:
    """Return the matrix (rows, columns) in float32."""
    rows, columns = elements.shape
    each = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return elements.float() * each


def quantize_export(export: WeightExport) -> WeightExport:
    """Return the export with 8-bit matrices. The scales of a matrix follow it in the same bucket."""
    manifest = export.manifest and Manifest(_infos(export.manifest), export.manifest.updates)
    return WeightExport(manifest, (WeightBucket(list(_parts(bucket.tensors))) for bucket in export.buckets))


def dequantize_bucket(tensors: Named) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a bucket of ``quantize_export`` by their names, with whole matrices in float32."""
    elements: Tensor | None = None
    for name, tensor in tensors:
        if tensor.dtype == FORMAT:
            elements = tensor
        elif elements is None:
            yield name, tensor
        else:
            yield name.removesuffix(_SUFFIX), dequantize(elements, tensor)
            elements = None


def _parts(tensors: Named) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if is_quantized(name, tuple(tensor.shape)):
            elements, scales = quantize(tensor)
            yield from ((name, elements), (f"{name}{_SUFFIX}", scales))
        else:
            yield name, tensor


def _infos(manifest: Manifest) -> dict[str, TensorInfo]:
    infos = dict(manifest.tensors)
    for name, info in manifest.tensors.items():
        if is_quantized(name, info.shape):
            infos[name] = TensorInfo(dtype_name(FORMAT), info.shape)
            infos[f"{name}{_SUFFIX}"] = TensorInfo("float32", _grid(info.shape))
    return infos


def _grid(shape: Shape) -> Shape:
    return tuple(-(-size // BLOCK) for size in shape)
