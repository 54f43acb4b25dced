"""Extension of SGLang's scheduler processes: receives weights, records routes, and adapts three behaviors.

The engine starts every scheduler through ``run_scheduler``, which replaces SGLang's scheduler class with
``EngineScheduler``.
"""

import gc
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sglang.srt.distributed.device_communicators import pynccl
from sglang.srt.layers.sampler import register_sampler_backend
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers import schedule_batch
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor as Processor
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
from sglang.srt.utils.common import async_h2d

from rollout.limits import on_cpu
from rollout.requests import StopTexts, stop_window
from rollout.sglang.arguments import SAMPLING_BACKEND
from rollout.sglang.sampler import SeededSampler
from rollout.weight_update import AnswerQueue, attempt, function_of, take_factors
from slime_like.errors import WeightSyncError
from slime_like.hosting.faults import one_line
from slime_like.interfaces import BucketMetadata
from slime_like.models.tokenization import load_tokenizer
from slime_like.system import heartbeat
from slime_like.system.processes import keep_freed_memory
from slime_like.weights.adapter import ADAPTER
from slime_like.weights.received import WeightReceiver


def run_scheduler(answers: AnswerQueue, inherited: int | None, *arguments: Any, **options: Any) -> None:
    """Run SGLang's ``run_scheduler_process`` with our scheduler, which sends its answers to ``answers``."""
    if inherited is not None:  # the fork's copy of the owner's socket must be closed
        os.close(inherited)
    tempfile.tempdir = None  # the parent's directory will be removed
    heartbeat.start()
    if on_cpu():
        keep_freed_memory()
        _join_without_nccl()
        # Otherwise it would attend to the cache's latents as if they were keys.
        AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)
        if arguments[0].enable_lora:
            _unpin()
    if arguments[0].enable_return_routed_experts:
        # On a CPU, SGLang would register the memory with CUDA.
        ALLOC_MEMORY_FUNCS["cpu"] = lambda shape, dtype, **_: torch.empty(shape, dtype=dtype)
        _keep_first_routes()
    register_sampler_backend(SAMPLING_BACKEND, SeededSampler)
    EngineScheduler.answers = answers  # SGLang creates the instance
    sglang_scheduler.Scheduler = EngineScheduler
    sglang_scheduler.run_scheduler_process(*arguments, **options)


class EngineScheduler(Scheduler):
    """SGLang's scheduler with the changes described at its methods, and weights from our transports."""

    answers: AnswerQueue
    waiting_queue: list[Req]
    tokenizer: Any

    def __init__(self, *arguments: Any) -> None:
        try:
            super().__init__(*arguments)
        except Exception as error:
            self.answers.put((None, one_line(error), ""))
            raise
        if self.server_args.enable_return_routed_experts:
            # Layers that never write routes keep -1.
            get_global_experts_capturer().device_cache.buffer.fill_(-1)
        self.model_config.hf_eos_token_id = set()  # a request's own stop ids replace the model's
        _read_seeds()
        self.receiver = WeightReceiver(get_parallel().tp_rank)
        # On a CPU, a flush collects garbage. Searching all imported objects would take half a second.
        gc.freeze()

    def handle_generate_request(self, recv_req: TokenizedGenerateReqInput, **options: Any) -> None:
        """Give a request its stop strings, and something to decode with."""
        sampling, arguments = recv_req.sampling_params, self.server_args
        if given := sampling.custom_params:
            if self.tokenizer is None:
                self.tokenizer = StopTexts(load_tokenizer(Path(arguments.model_path), arguments.trust_remote_code))
            sampling.stop_strs, sampling.stop_str_max_len = given["stop"], stop_window(given["stop"])
            sampling.custom_params = None
        super().handle_generate_request(recv_req, **options)

    def run_batch(self, *arguments: Any, **options: Any) -> Any:
        """Run a batch. Record progress for the engine's actor."""
        heartbeat.beat()
        return super().run_batch(*arguments, **options)

    def abort_request(self, recv_req: AbortReq) -> None:
        """End frozen requests with all their sampled tokens. SGLang would drop the last few."""
        waiting = [req for req in self.waiting_queue if recv_req.abort_all or req.rid.startswith(recv_req.rid)]
        frozen = [req for req in waiting if req.output_ids]
        self.waiting_queue = [req for req in self.waiting_queue if req not in frozen]
        for req in frozen:
            self._release_aborted_request(req)
            req.finished_reason = FINISH_ABORT()
            self.output_streamer.stream_output([req], req.return_logprob)
        super().abort_request(recv_req)

    def _record_scheduler_state_for_paused_engine(self) -> None:
        """Wait for a message while paused, because SGLang would poll with a whole core."""
        super()._record_scheduler_state_for_paused_engine()
        self.maybe_sleep_on_idle()

    # ----------------------------------------------- called by SGLang's collective RPC, which carries plain values only
    def receive(self, call: str) -> None:
        """Call a method of the receiver, or a function (``function_of``), and send the answer to the host."""
        method, *arguments = json.loads(call)
        self.answers.put(attempt(lambda: function_of(self, method)(*arguments)))


def load(scheduler: EngineScheduler, metadata: dict[str, Any]) -> None:
    runner = scheduler.tp_worker.model_runner
    with torch.inference_mode():
        runner.model.load_weights(scheduler.receiver.copies(BucketMetadata.from_wire(metadata), runner.device))


def serve_adapter(scheduler: EngineScheduler, settings: dict[str, Any], *source: Any) -> None:
    """Replace the adapter by factors from ``source``.

    SGLang's own calls would wait until no request uses the adapter, but frozen requests do. Raises ``WeightSyncError``
    if SGLang rejects the factors.
    """
    manager = scheduler.tp_worker.model_runner.lora_manager
    adapter = LoRARef(lora_id=ADAPTER, lora_name=ADAPTER, lora_path="__tensor__", pinned=False)
    manager.unload_lora_adapter(adapter)
    loaded = manager.load_lora_adapter_from_tensors(adapter, take_factors(scheduler.receiver, *source), settings)
    if not loaded.success:
        raise WeightSyncError(loaded.error_message, code="adapter-not-loaded")
    manager.fetch_new_loras({None, ADAPTER})  # otherwise the next step would, whose failure ends the process


def _join_without_nccl() -> None:
    """Make ranks on a CPU use gloo. With a CUDA build of torch, SGLang finds NCCL's library and would use it."""

    def missing(library: object, path: str | None = None) -> None:
        raise OSError("NCCL needs a CUDA device")

    pynccl.NCCLLibrary.__init__ = missing


def _unpin() -> None:
    """Ignore pinning, which SGLang's LoRA asks for on every device and torch without CUDA rejects."""

    def unpinned(make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return make(*arguments, **{**options, "pin_memory": False})

    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, partial(unpinned, getattr(torch, name)))


def _keep_first_routes() -> None:
    """Keep a request's routes when it is retracted, because it may be read again with other weights.

    SGLang keeps routes by their place in the cache of keys and values.
    """
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


def _read_seeds() -> None:
    """Give every batch its requests' seeds. SGLang sets them only with ``--enable-deterministic-inference``."""
    original = SamplingBatchInfo.from_schedule_batch

    def with_seeds(batch: Any, vocab_size: int) -> SamplingBatchInfo:
        info = original(batch, vocab_size)
        seeds = [req.sampling_params.sampling_seed for req in batch.reqs]
        # A copy from memory that is not pinned would wait for the device.
        info.sampling_seed = async_h2d(seeds, dtype=torch.int64, device=info.temperatures.device)
        return info

    SamplingBatchInfo.from_schedule_batch = with_seeds
