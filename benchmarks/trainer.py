"""One optimizer step of a trainer backend on one rank: ``python -m benchmarks.trainer [--backend megatron fsdp]``.

Every backend is given the same packs of the same tiny model, in a process of its own. Prints medians in seconds, and
those of the step's processor time, which other programs on the machine disturb least (``--threads 1``).
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import tempfile
import time
from pathlib import Path

import torch

from slime_like.algorithms import pack_sequences, partition_by_tokens, real_tokens
from slime_like.config import RunConfig
from slime_like.data.tiny_model import VOCAB_SIZE, make_tiny_model
from slime_like.interfaces import RankPlacement
from slime_like.orchestration.plugins import load_backend
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory

PROMPT, RESPONSES, SEQUENCES, BUDGET = 10, (2, 9), 256, 8192


def packs() -> list[PackedTrajectory]:
    """A minibatch of the quickstart's shape."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(*RESPONSES, (SEQUENCES,), generator=generator).tolist()
    sequences = [_sequence(index, length, generator) for index, length in enumerate(lengths)]
    (replica,) = partition_by_tokens([s.total_len for s in sequences], BUDGET, 1)
    return [pack_sequences([sequences[index] for index in micro_batch]) for micro_batch in replica]


def _sequence(index: int, response: int, generator: torch.Generator) -> ScoredTrajectory:
    return ScoredTrajectory(
        prompt_tokens=torch.randint(8, VOCAB_SIZE, (PROMPT,), generator=generator),
        response_tokens=torch.randint(8, VOCAB_SIZE, (response,), generator=generator),
        prompt_len=PROMPT,
        response_len=response,
        logprobs=-torch.rand(response, generator=generator),
        ref_logprobs=None,
        rewards=torch.zeros(1),
        successes=torch.zeros(1),
        advantages=torch.randn((), generator=generator),
        answer="",
        sequence_id=f"s{index}",
        group_id=index // 8,
        reward_metadata={"func_names": ["none"]},
        policy_version=0,
        loss_mask=torch.ones(response, dtype=torch.bool),
    )


def measure(
    backend: str, model: Path, repeats: int, threads: int | None, results: multiprocessing.SimpleQueue[dict[str, float]]
) -> None:
    """Start, scoring and whole steps of one rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = RunConfig(
        run_dir=model.parent / backend,
        model={"path": model, "dtype": "float32"},
        trainer={"backend": backend, "target_tokens_per_batch": BUDGET, "cpu_threads": threads},
    )
    started = time.perf_counter()
    trainer = load_backend(backend)(config, RankPlacement(0, 1, 0, "127.0.0.1", port))
    trainer.setup()
    figures = {"start": time.perf_counter() - started}
    batch = packs()
    scoring, training, processor = [], [], []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        scored = trainer.score(batch)
        scoring.append(time.perf_counter() - begin)
        for pack, values in zip(batch, scored or [], strict=True):
            pack.old_logprobs = values.logprobs
        begin, used = time.perf_counter(), time.process_time()
        trainer.begin_step(float(SEQUENCES), real_tokens(batch))
        trainer.accumulate(batch, last=True)
        trainer.finish_step(float(SEQUENCES))
        training.append(time.perf_counter() - begin)
        processor.append(time.process_time() - used)
    trainer.shutdown()
    names = ("score", "step", "processor")
    figures |= {name: statistics.median(v[2:]) for name, v in zip(names, (scoring, training, processor), strict=True)}
    results.put(figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", nargs="+", default=["megatron", "fsdp"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, help="of each rank; all cores if left out")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        make_tiny_model(model)
        tokens = sum(pack.actual_total_tokens for pack in packs())
        print(f"{SEQUENCES} sequences, {tokens} tokens a step, {len(packs())} micro-batches, one rank")
        print("| backend | start (s) | score (s) | optimizer step (s) | of the processor (s) | tokens/s |")
        print("|---|---|---|---|---|---|")
        for backend in options.backend:
            results = context.SimpleQueue()
            process = context.Process(target=measure, args=(backend, model, options.repeats, options.threads, results))
            process.start()
            process.join(600)
            if process.exitcode != 0:
                process.kill()
                raise SystemExit(f"{backend}: ended with {process.exitcode}")
            own = results.get()
            rate = tokens / own["step"]
            seconds = " | ".join(f"{own[name]:.3f}" for name in ("start", "score", "step", "processor"))
            print(f"| {backend} | {seconds} | {rate:,.0f} |")


if __name__ == "__main__":
    main()
