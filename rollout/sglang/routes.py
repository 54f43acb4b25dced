"""Experts that SGLang's routers choose. SGLang keeps them by place in the cache of keys and values."""

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

    def releasing(*, req: Any, req_to_token_pool: Any, **others: Any) -> bool:
        routes, length = req.routed_experts, len(req.origin_input_ids) + len(req.output_ids)
        known = 0 if routes is None else len(routes)
        # Without a sampled token, or if none was sampled since the last retraction, the cache may be incomplete.
        if req.return_routed_experts and req.output_ids and length - 1 > known:
            read = get_global_experts_capturer().get_topk(req.kv.req_pool_idx, length, req_to_token_pool)
            routes = read if routes is None else torch.cat((routes, read[known:]))
        released = bool(release(req=req, req_to_token_pool=req_to_token_pool, **others))
        req.routed_experts = routes  # which SGLang dropped; also for a request that is then aborted
        return released

    def collecting(self: Any, req: Any) -> None:
        routes = req.routed_experts
        collect(self, req)
        if routes is not None:
            req.routed_experts[: len(routes)] = routes

    schedule_batch.release_req, Processor._maybe_collect_routed_experts = releasing, collecting
