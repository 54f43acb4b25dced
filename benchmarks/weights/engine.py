"""Whole updates of real engines: what loading and repacking take, and which share of it verification is.

Each engine has one thread, as in a run. vLLM and SGLang run in separate processes, transformers shares the sender's.
Half the layers of the model of the other parts: an engine on a CPU holds its weights more than once while it starts.
"""

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.weights.model import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, buckets_of
from benchmarks.weights.transports import BUCKET_BYTES
from slime_like.config import DataConfig, ModelConfig, RolloutConfig, RunConfig
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import (
    BucketMetadata,
    GenerationRequest,
    Manifest,
    PromptInput,
    RolloutEngine,
    SamplingParams,
    load_engine,
)
from slime_like.weights.transport import Sender
from slime_like.weights.transports.registry import open_sender

_REPEATS = 7
_PROBE_TOKENS = 32
_NAME = "shared_memory"
_ENGINES = ("transformers", "vllm", "sglang")


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the updates after the first.

    Attributes:
        seconds: seconds of the update without the probe.
        send_hash_s, receive_hash_s: hashing of sender and engine, which overlap each other and other work.
        probe_s: seconds of the engine's part of the probe.
    """

    name: str
    nbytes: int
    seconds: float
    send_hash_s: float
    receive_hash_s: float
    probe_s: float

    @property
    def verify_share(self) -> float:
        """Upper bound on verification as a percentage of update and probe together."""
        return 100 * (self.send_hash_s + self.receive_hash_s + self.probe_s) / (self.seconds + self.probe_s)


def measure(scratch: Path) -> list[Row]:
    """Return one row per engine."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # as Ray does for an engine's process
    model = scratch / "model"
    make_tiny_model(
        model,
        family="qwen2",
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS // 2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
    )
    weights = {name: value.bfloat16() for name, value in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return [
        asyncio.run(_measure_engine(name, load_engine(name)(_config(name, model, scratch), 0), weights))
        for name in _ENGINES
    ]


def _config(engine: str, model: Path, scratch: Path) -> RunConfig:
    bounds = {"start_timeout_s": 600, "request_timeout_s": 300}
    return RunConfig(
        run_dir=scratch / "run",
        model=ModelConfig(path=model, dtype="bfloat16"),
        data=DataConfig(max_prompt_tokens=64),
        rollout=RolloutConfig(engine=engine, max_new_tokens=64, **bounds),
    )


async def _measure_engine(name: str, engine: RolloutEngine, weights: dict[str, Tensor]) -> Row:
    await engine.start()
    sender = open_sender(_NAME, "engine-benchmark")
    try:
        await engine.connect(_NAME, sender.rendezvous())
        updates = [await _update(engine, sender, weights, version) for version in range(1, _REPEATS + 2)][1:]
    finally:
        sender.close()
        await engine.stop()
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    return Row(name, nbytes, *(median(update[index] for update in updates) for index in range(4)))


async def _update(
    engine: RolloutEngine, sender: Sender, weights: dict[str, Tensor], version: int
) -> tuple[float, float, float, float]:
    """Return seconds of the update, of hashing by sender and engine, and of the probe."""
    started = time.perf_counter()
    await engine.begin_update(version, Manifest.of(weights))
    send_hash_s = 0.0
    loading: asyncio.Task[None] | None = None
    previous: BucketMetadata | None = None
    for bucket in [*buckets_of(weights, BUCKET_BYTES), None]:
        metadata = None if bucket is None else await asyncio.to_thread(sender.send, bucket)
        if loading is not None and previous is not None:
            await loading
            sender.release(previous)
        if metadata is not None:
            send_hash_s += metadata.hash_s
            loading, previous = asyncio.create_task(engine.update(metadata)), metadata
    receipt = await engine.finish_update(version)
    updated = time.perf_counter()
    await _probe(engine, version)
    return updated - started, send_hash_s, receipt.hash_s, time.perf_counter() - updated


async def _probe(engine: RolloutEngine, version: int) -> None:
    sampling: Any = SamplingParams(temperature=0.0, max_new_tokens=1, training=False)
    prompts = [[(7919 * (index + 1) * place) % VOCAB for place in range(_PROBE_TOKENS)] for index in range(2)]
    requests = [
        GenerationRequest(f"p{version}-{index}", PromptInput(tokens), sampling, prompt_logprobs=True)
        for index, tokens in enumerate(prompts)
    ]
    await asyncio.gather(*(engine.generate(request) for request in requests))
