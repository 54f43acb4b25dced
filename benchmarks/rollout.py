"""Tokens per second through the whole rollout path against the bare engine: ``python -m benchmarks.rollout``.

A model of 0.1 B parameters with random weights answers the same prompts with the same seeds, twice. Bare: the engine in
one process, without Ray, given everything at once (vLLM by AsyncLLM; the others, which have no such interface
for token ids with whole-vocabulary logprobs, by our adapter). Whole path: prompts become requests, which
``Engines`` sends over Ray to an engine with the same arguments; the answers become trajectories, are rewarded in a
worker process and get their advantages. Both sides have as many threads, and are warm when they are measured.
"""

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import heading, met, parser, publish, table
from slime_like.config import RunConfig
from slime_like.data.prompts import Prompt, PromptSource
from slime_like.examples.tiny_model import make_arithmetic_data, make_tiny_model
from slime_like.interfaces import Generation, GenerationRequest
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.tokenization import load_tokenizer
from slime_like.orchestration.rollout.requests import build_requests, to_group, training_sampling

GOAL = 0.90
_WARM_UP_PROMPTS, _TIMEOUT_S = 2, 900.0
_SIZES: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


@dataclass(frozen=True)
class Figures:
    """Seconds and sampled tokens of every measured round, and a hash of all sampled tokens."""

    seconds: list[float]
    tokens: list[int]
    sampled: int

    @property
    def speeds(self) -> list[float]:
        """Return every round's tokens per second."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]

    @property
    def per_s(self) -> float:
        return median(self.speeds)


def configure(options: argparse.Namespace) -> RunConfig:
    model = options.out / "model"
    return RunConfig(
        run_dir=options.out / "run",
        model={"path": model, "dtype": "float32"},
        data={"train": [model / "data" / "train.jsonl"], "apply_chat_template": False, "max_prompt_tokens": 16},
        rollout={"engine": options.engine, "samples_per_prompt": options.samples, "max_new_tokens": options.tokens},
        logging={"tensorboard": False, "progress": "off"},
    )


def rounds(config: RunConfig, count: int, size: int) -> list[list[Prompt]]:
    """Return a short warm-up round, then the measured rounds."""
    source = PromptSource(config.data.train, load_tokenizer(config.model.path), config.data, config.seed)
    return [source.next(_WARM_UP_PROMPTS), *(source.next(size) for _ in range(count))]


def requests_of(config: RunConfig, prompts: Sequence[Prompt]) -> list[GenerationRequest]:
    return build_requests(
        prompts,
        training_sampling(config.rollout, config.model),
        config.rollout.samples_per_prompt,
        config.seed,
        "benchmark",
    )


def _hash(total: int, answers: Sequence[Sequence[Generation]]) -> int:
    for generation in (found for answer in answers for found in answer):
        for token in generation.token_ids.tolist():
            total = (total * 1_000_003 + token) & ((1 << 64) - 1)
    return total


async def measure_bare(config: RunConfig, batches: Sequence[Sequence[Prompt]]) -> Figures:
    from rollout.vllm.sampling import generations

    vllm, dimensions = config.rollout.engine == "vllm", ModelDimensions.from_checkpoint(config.model.path)
    ask, stop = await (_start_vllm(config) if vllm else _start_adapter(config))
    seconds, tokens, sampled = [], [], 0
    for index, prompts in enumerate(batches):
        started = time.perf_counter()
        requests = requests_of(config, prompts)
        outputs = await asyncio.gather(*(ask(request) for request in requests))
        taken = time.perf_counter() - started
        answers = [
            generations(request, output, 0, dimensions) if vllm else output
            for request, output in zip(requests, outputs, strict=True)
        ]
        if index:
            seconds.append(taken)
            tokens.append(sum(len(generation.token_ids) for answer in answers for generation in answer))
            sampled = _hash(sampled, answers)
    await stop()
    del ask, stop
    gc.collect()  # AsyncLLM is in reference cycles and complains if it is collected at interpreter exit
    return Figures(seconds, tokens, sampled)


async def _start_vllm(config: RunConfig):  # type: ignore[no-untyped-def]
    from rollout.vllm.arguments import engine_arguments, prepare_environment

    prepare_environment(config.rollout)
    from vllm.inputs.engine import tokens_input
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollout.vllm.sampling import sampling_params

    dimensions = ModelDimensions.from_checkpoint(config.model.path)
    llm = AsyncLLM.from_engine_args(engine_arguments(config, 0))
    await llm.update_weight_version("0")

    async def ask(request: GenerationRequest) -> object:
        parameters = sampling_params(request, dimensions)
        async for output in llm.generate(tokens_input(list(request.prompt.token_ids)), parameters, request.request_id):
            last = output
        return last

    async def stop() -> None:
        llm.shutdown()

    return ask, stop


async def _start_adapter(config: RunConfig):  # type: ignore[no-untyped-def]
    from slime_like.interfaces import load_engine

    engine = load_engine(config.rollout.engine)(config, 0)
    await engine.start()
    return engine.generate, engine.stop


def measure_in_a_process(options: argparse.Namespace) -> Figures:
    """Measure the bare engine in a separate process."""
    command = [sys.executable, "-m", "benchmarks.rollout", "--bare", *sys.argv[1:]]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=True)
    return Figures(**json.loads(finished.stdout.strip().splitlines()[-1]))


def measure_path(config: RunConfig, batches: Sequence[Sequence[Prompt]]) -> Figures:
    from slime_like.orchestration.cluster.bundles import pieces_of
    from slime_like.orchestration.cluster.cluster import Cluster
    from slime_like.orchestration.cluster.placement import Placement
    from slime_like.orchestration.rollout.scoring import Scorer
    from slime_like.orchestration.run.engines import launch_engines

    config.run_dir.mkdir(parents=True, exist_ok=True)
    seconds, tokens, sampled = [], [], 0
    with ExitStack() as stack:
        slots = sum(pieces_of(config, with_trainers=False).bundles)
        stack.enter_context(Cluster(config.cluster, config.run_dir / "worker_logs", slots))
        placement = stack.enter_context(Placement(config, with_trainers=False))
        engines, pool = launch_engines(config, stack, placement, print)
        pool.start()
        engines.start()
        scorer = Scorer(config, pool, load_tokenizer(config.model.path))
        for index, prompts in enumerate(batches):
            started = time.perf_counter()
            answers = engines.generate_all(requests_of(config, prompts))
            groups = [to_group(prompt, found, 1.0) for prompt, found in zip(prompts, answers, strict=True)]
            trajectories = scorer.scored(scorer.rewards(groups), step=index + 1)
            taken = time.perf_counter() - started
            if index:
                seconds.append(taken)
                tokens.append(sum(trajectory.response_len for trajectory in trajectories))
                sampled = _hash(sampled, answers)
    return Figures(seconds, tokens, sampled)


def report(bare: Figures, path: Figures, config: RunConfig, options: argparse.Namespace) -> str:
    parameters = ModelDimensions.from_checkpoint(config.model.path).active_parameters / 1e6
    ratio = path.per_s / bare.per_s
    same = "the same ids on both sides" if bare.sampled == path.sampled else "ids differ between the sides"
    spread = ", ".join(f"{a:.0f} of {b:.0f}" for a, b in zip(path.speeds, bare.speeds, strict=True))
    sides = {"bare engine": bare, "whole path, to scored trajectories": path}
    rows = [(name, f"{side.per_s:,.0f}", f"{median(side.seconds):.2f}") for name, side in sides.items()]
    return (
        f"Qwen3 of {parameters:.0f} M parameters, float32, {options.threads} thread(s) for the engine; "
        f"{options.rounds} rounds of {options.prompts} prompts x {options.samples} samples of up to {options.tokens} "
        f"tokens; {same}.\n\n{table(' | tokens/s | seconds of a round', rows)}\n\n"
        f"{ratio:.1%} of the bare engine's speed (goal {GOAL:.0%}: {met(ratio >= GOAL)}; by rounds {spread} tokens/s)."
    )


def main() -> None:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--engine", default="vllm")
    add("--prompts", type=int, default=16, help="of one round")
    add("--samples", type=int, default=8, help="responses to each")
    add("--tokens", type=int, default=64, help="of a response, at most")
    add("--rounds", type=int, default=2)
    add("--threads", type=int, default=1, help="of the engine; Ray gives an actor one per CPU slot")
    add("--out", type=Path, default=Path("runs/rollout_benchmark"))
    add("--bare", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    options.out = options.out.absolute()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # torch reads it when an engine starts
    config = configure(options)
    if options.bare:
        figures = asyncio.run(measure_bare(config, rounds(config, options.rounds, options.prompts)))
        print(json.dumps(asdict(figures)))
        return
    head = heading()
    if not (config.model.path / "config.json").is_file():
        make_tiny_model(config.model.path, max_position_embeddings=512, **_SIZES)
        make_arithmetic_data(config.model.path / "data")
    bare = measure_in_a_process(options)
    path = measure_path(config, rounds(config, options.rounds, options.prompts))
    publish(f"{head}\n\n{report(bare, path, config, options)}", options.result)


if __name__ == "__main__":
    main()
