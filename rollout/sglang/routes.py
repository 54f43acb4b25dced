"""Experts that SGLang's routers choose. SGLang keeps them by place in the cache of keys and values."""

from functools import wraps
from typing import Any

import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor as Processor
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer


def record_on_cpu() -> None:
    """Let SGLang record on a CPU, where its memory would be registered with CUDA."""
    ALLOC_MEMORY_FUNCS["cpu"] = lambda shape, dtype, **_: torch.empty(shape, dtype=dtype)


def mark_unrecorded() -> None:
    """Write -1 for every layer. Layers that never write routes keep it."""
    get_global_experts_capturer().device_cache.buffer.fill_(-1)


def keep_first_routes() -> None:
    """Keep a request's routes when it is retracted, because it may be read again with other weights."""
    release, collect = schedule_batch.release_req, Processor._maybe_collect_routed_experts

    @wraps(release)
    def releasing(*, req: Any, req_to_token_pool: Any, **others: Any) -> bool:
        read = len(req.origin_input_ids) + len(req.output_ids) - 1
        # Without a sampled token, or if the request has not been read again since it was retracted, its cache may be
        # incomplete.
        if req.return_routed_experts and req.output_ids and read > len(first_routes(req)):
            again = get_global_experts_capturer().get_topk(req.kv.req_pool_idx, read + 1, req_to_token_pool)
            req.first_routes = _joined(req, again)
        return bool(release(req=req, req_to_token_pool=req_to_token_pool, **others))

    @wraps(collect)
    def collecting(self: Any, req: Any) -> None:
        collect(self, req)
        if req.routed_experts is not None:
            req.routed_experts = _joined(req, req.routed_experts)

    schedule_batch.release_req, Processor._maybe_collect_routed_experts = releasing, collecting


def first_routes(req: Any) -> Any:
    """Return routes (n, layers, choices) of the tokens that were read before the request was retracted."""
    return getattr(req, "first_routes", ())


def _joined(req: Any, again: torch.Tensor) -> torch.Tensor:
    if known := len(first_routes(req)):
        again[:known] = req.first_routes
    return again
