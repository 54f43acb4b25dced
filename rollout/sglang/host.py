"""SGLang's process, with its tokenizer manager; the parent of its schedulers.

A separate process, because SGLang takes over its process: schedulers report failures by SIGQUIT, a shutdown ends every
child of the process, and the event loop's policy is replaced.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq
from sglang.srt.managers import io_struct

from rollout.requests import finish_reason, sample_seed, stop_ids, supports_of, weight_versions
from rollout.weight_update import AnswerQueue, results
from slime_like.errors import EngineError, WeightSyncError
from slime_like.interfaces import Generation, GenerationRequest, PauseMode, Supports
from slime_like.models.dimensions import ModelDimensions
from slime_like.weights.adapter import ADAPTER

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

    from slime_like.config import RunConfig


class Host:
    """Handler of the owner's calls for one SGLang engine. All methods run in one event loop."""

    def __init__(self, engine: Engine, answers: AnswerQueue, config: RunConfig, engine_index: int) -> None:
        self._manager = engine.tokenizer_manager
        self._ranks = _Ranks(engine, answers, config.rollout.tensor)
        self._dimensions = ModelDimensions.from_checkpoint(config.model.path)
        self._unseeded = random.Random(config.seed * 1_000_003 + engine_index)
        self._version = 0
        self._running: dict[str, _Running] = {}
        self._sampling: dict[str, asyncio.Event] = {}
        self._open = asyncio.Event()  # not set while paused
        self._open.set()
        self._updating = False
        self._adapter = ADAPTER if config.model.lora.sends_factors else None
        self._routes = config.algorithm.routing_replay == "rollout"

    # --------------------------------------------------------------------------------------------------------- requests
    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Send one request with its own seed per sample; greedy ones are sampled once."""
        running = self._running[request.request_id] = _Running(request)
        greedy = request.sampling.temperature == 0
        tasks = [asyncio.ensure_future(self._sample(running, i)) for i in range(1 if greedy else request.num_samples)]
        try:
            samples = await asyncio.gather(*tasks)
        except BaseException:
            self._abort(running)
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        finally:
            del self._running[request.request_id]
        return samples * request.num_samples if greedy else samples

    async def abort(self, request_id: str) -> None:
        if (running := self._running.get(request_id)) is not None:
            self._abort(running)

    async def pause(self, mode: PauseMode) -> None:
        """Block new samples; then end or freeze running ones."""
        self._open.clear()
        if mode == "abort":
            for running in self._running.values():
                self._abort(running)
            await asyncio.gather(*(ended.wait() for ended in self._sampling.values()))
        # Running requests move back to the queue without their caches.
        await self._manager.pause_generation(io_struct.PauseGenerationReqInput(mode="retract"))
        await self._flush()

    async def resume(self) -> None:
        await self._manager.continue_generation(io_struct.ContinueGenerationReqInput(torch_empty_cache=False))
        self._open.set()

    # ---------------------------------------------------------------------------------------------------------- weights
    async def receive(self, method: str, *arguments: Any) -> list[Any]:
        """Call ``EngineScheduler.receive`` of every rank."""
        return await self._ranks.call("receive", call=json.dumps([method, *arguments]))

    async def begin_update(self) -> None:
        await self._close_update()
        await self.receive("begin_update")
        _require(await self._manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput()))
        self._updating = True

    async def _close_update(self) -> None:
        if self._updating:
            self._updating = False
            _require(await self._manager.end_weight_update(io_struct.EndWeightUpdateReqInput()))

    async def finish_update(self, version: int) -> None:
        await self._close_update()
        await self._manager.update_weight_version(
            io_struct.UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        )
        await self._flush()
        self._version = version

    # ----------------------------------------------------------------------------------------------------------- memory
    async def release_memory(self, parts: Sequence[str]) -> None:
        await self._manager.release_memory_occupation(io_struct.ReleaseMemoryOccupationReqInput(tags=list(parts)))

    async def resume_memory(self, parts: Sequence[str]) -> None:
        await self._manager.resume_memory_occupation(io_struct.ResumeMemoryOccupationReqInput(tags=list(parts)))

    async def ping(self) -> None:
        await self._manager.get_internal_state()

    # ---------------------------------------------------------------------------------------------------------- private
    async def _sample(self, running: _Running, index: int) -> Generation:
        request = running.request
        seed = self._unseeded.getrandbits(62) if request.seed is None else sample_seed(request.seed, index)
        submission = io_struct.GenerateReqInput(
            rid=f"{running.prefix}{index}.",
            input_ids=list(request.prompt.token_ids),
            sampling_params=sampling_params(request, self._dimensions, seed),
            return_logprob=True,
            logprob_start_len=0 if request.prompt_logprobs else -1,
            top_logprobs_num=min(request.sampling.top_k, self._dimensions.vocab_size)
            if request.sampling.wants_supports
            else 0,
            stream=False,
            return_routed_experts=self._routes and request.sampling.training,
            lora_id=self._adapter,  # with a path, an update would wait for requests, which may be frozen
        )
        await running.wait_for(self._open)
        if running.aborted.is_set():
            return nothing()
        # Nothing awaits between here and the scheduler, so no pause or abort can intervene.
        ended = self._sampling[submission.rid] = asyncio.Event()
        try:
            async for output in self._manager.generate_request(submission):
                return generation(request, output, self._version, self._dimensions)
        finally:
            del self._sampling[submission.rid]
            ended.set()
        raise EngineError(f"request {request.request_id} ended without an output", code="no-output")

    def _abort(self, running: _Running) -> None:
        running.aborted.set()
        for index in range(running.request.num_samples):
            self._manager.abort_request(f"{running.prefix}{index}.")

    async def _flush(self) -> None:
        answer = await self._manager.flush_cache()
        if not answer.success:
            raise EngineError(f"SGLang did not flush its cache: {answer.message}", code="cache-not-flushed")


class _Ranks:
    """The schedulers of all ranks, called through SGLang's collective RPC, one call at a time."""

    def __init__(self, engine: Engine, answers: AnswerQueue, count: int) -> None:
        self._engine = engine
        self._answers = answers
        self._count = count
        self._turn = asyncio.Lock()

    async def call(self, method: str, **parameters: str) -> list[Any]:
        async with self._turn:
            socket = self._engine.send_to_rpc
            io_struct.sock_send(socket, io_struct.RpcReqInput(method=method, parameters=parameters or None))
            await asyncio.to_thread(socket.poll, None, zmq.POLLIN)
            answer = io_struct.sock_recv(socket)
            if not answer.success:
                raise WeightSyncError(answer.message, code="rank-failed")
            return results([self._answers.get() for _ in range(self._count)])


class _Running:
    """A running request."""

    _arrivals = itertools.count()

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        # SGLang aborts all requests whose ids begin with the given one, so no id may be a prefix of another.
        self.prefix = f"{next(self._arrivals)}."
        self.aborted = asyncio.Event()

    async def wait_for(self, gate: asyncio.Event) -> None:
        while not gate.is_set() and not self.aborted.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (gate, self.aborted)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()


def _require(answer: tuple[bool, str]) -> None:
    success, message = answer
    if not success:
        raise WeightSyncError(message, code="rank-failed")


# ---------------------------------------------------------- conversion of requests and outputs
def sampling_params(request: GenerationRequest, dimensions: ModelDimensions, seed: int) -> dict[str, Any]:
    """Return SGLang's parameters of one sample. ``ignore_eos`` stays off, because it would ignore every stop id.

    SGLang rejects stop strings without its own tokenizer, so only the scheduler gets them.
    """
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "min_p": sampling.min_p,
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(stop_ids(sampling, dimensions)),
        "custom_params": {"stop": list(sampling.stop)} if sampling.stop else None,
        "sampling_seed": seed,
    }


def generation(
    request: GenerationRequest, output: dict[str, Any], version: int, dimensions: ModelDimensions
) -> Generation:
    """Return one sample's result. Responses without a token get the served ``version``."""
    meta = output["meta_info"]
    token_ids = np.asarray(output["output_ids"], dtype=np.int64)
    spans = ((span["start"], span["end"], span["version"]) for span in meta.get("weight_versions") or ())
    return Generation(
        token_ids=token_ids,
        logprobs=_sampled_logprobs(meta, token_ids),
        weight_versions=weight_versions(len(token_ids), version, spans),
        finish_reason=finish_reason(request, "SGLang", meta["finish_reason"]["type"], meta["finish_reason"]),
        prompt_logprobs=_prompt_logprobs(meta) if request.prompt_logprobs else None,
        supports=_supports(meta, len(token_ids)) if request.sampling.wants_supports else None,
        fields=_routes(meta, dimensions) if meta.get("routed_experts") is not None else {},
    )


def nothing() -> Generation:
    """Return the result of a sample that was aborted before SGLang received it."""
    empty = np.empty(0, dtype=np.int64)
    return Generation(empty, np.empty(0, dtype=np.float32), empty, "abort")


def _sampled_logprobs(meta: dict[str, Any], token_ids: np.ndarray) -> np.ndarray:
    entries = meta.get("output_token_logprobs") or []
    if [entry[1] for entry in entries] != token_ids.tolist():
        problem = f"SGLang returned logprobs of other tokens than it sampled ({len(entries)} for {len(token_ids)})"
        raise EngineError(problem, code="engine-version", remedy="install a supported version")
    return np.asarray([entry[0] for entry in entries], dtype=np.float32)


def _supports(meta: dict[str, Any], count: int) -> Supports:
    if not count:
        return Supports.whole(0)
    entries = np.array([[entry[:2] for entry in row] for row in meta["output_top_logprobs"]], np.float64)
    return supports_of(entries[:, :, 1], entries[:, :, 0], "SGLang")


def _routes(meta: dict[str, Any], dimensions: ModelDimensions) -> dict[str, np.ndarray]:
    rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
    rows = rows.reshape(-1, dimensions.num_layers, dimensions.moe_top_k)
    return {"routes": rows[:, dimensions.expert_layers.start :].astype(np.int16)}


def _prompt_logprobs(meta: dict[str, Any]) -> np.ndarray | None:
    """Return logprobs from position 1 on; ``None`` if the prompt never ran."""
    entries = meta.get("input_token_logprobs")
    if not entries:
        return None
    return np.asarray([entry[0] for entry in entries[1:]], dtype=np.float32)
