"""SGLang's process, with its tokenizer manager; the parent of its schedulers.

A separate process, because SGLang takes over its process: schedulers report failures by SIGQUIT, a shutdown ends every
child of the process, and the event loop's policy is replaced.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import zmq
from sglang.srt.managers import io_struct

from rollout.ranks import AnswerQueue, common_checksums, results
from rollout.requests import sample_seed
from rollout.sglang.sampling import generation, nothing, sampling_params
from slime_like.errors import EngineError, WeightSyncError
from slime_like.interfaces import Generation, GenerationRequest, PauseMode
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
        return await self._ranks.call("receive", call=json.dumps([method, *arguments]))

    async def begin_update(self) -> None:
        await self._close_update()
        await self.receive("begin_update")
        _require(await self._manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput()))
        self._updating = True

    async def received(self) -> tuple[dict[str, int], float]:
        """Return the hashes of the open update's tensors, and the seconds spent hashing."""
        return common_checksums(await self.receive("received"))

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
