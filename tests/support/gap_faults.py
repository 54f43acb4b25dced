"""Runs with a fault each between engine and trainer, as real engines and trainers make them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from backends.fsdp import attention
from backends.fsdp.parallel import shard_of
from backends.fsdp.trainer import FsdpTrainer
from backends.megatron.trainer import MegatronTrainer
from rollout.transformers.engine import TransformersEngine
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config, save_config
from slime_like.data.dump import dump_path, save_trajectories
from slime_like.data.prompts import Prompt, PromptSource
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import (
    BucketMetadata,
    PromptInput,
    RankCoordinates,
    RankPlacement,
    SamplingParams,
    WeightBucket,
    WeightExport,
)
from slime_like.models.tokenization import load_tokenizer
from slime_like.orchestration.rollout.requests import build_requests, to_group, training_sampling
from slime_like.trajectory import ScoredTrajectory
from slime_like.verification.engine.subject import DrivenEngine, ReferenceModel, start_engine
from slime_like.weights.quantization import dequantize, quantize, quantize_export
from tests.conftest import Tiny

BOS = 1
REVERSED = "model.layers.1.mlp.down_proj.weight"
PERTURBED = (1, 2)


class ReversingEngine(TransformersEngine):
    """Engine that puts the rows of one tensor of an update into the wrong order. A loaded model is as it should be."""

    def _load_bucket(self, bucket: BucketMetadata) -> None:
        super()._load_bucket(bucket)
        if REVERSED in {entry.name for entry in bucket.entries}:
            tensor = self._destinations[REVERSED].data
            tensor.copy_(tensor.flip(0))


class PerturbedEngine(TransformersEngine):
    """Engine whose routers choose by logits with noise of 1e-2. Weights of the chosen experts are right."""

    def _load(self) -> Any:
        loaded = super()._load()
        generator = torch.Generator().manual_seed(0)
        for layer in PERTURBED:
            router = self.model.model.layers[layer].mlp.gate
            noise = 1e-2 * torch.randn(router.num_experts, generator=generator)
            router.forward = _noisy(router, noise)
        return loaded


def _noisy(router: Any, noise: torch.Tensor) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
        chosen = (logits + noise).topk(router.top_k, dim=-1).indices
        scores = logits.softmax(-1).gather(1, chosen)
        return logits, scores / scores.sum(-1, keepdim=True) if router.norm_topk_prob else scores, chosen

    return forward


class ExactTrainer(FsdpTrainer):
    """Trainer that computes in float32, whatever ``model.dtype`` says."""

    def __init__(self, config: RunConfig, placement: RankPlacement) -> None:
        model = config.model.model_copy(update={"dtype": "float32"})
        super().__init__(config.model_copy(update={"model": model}), placement)


class ShiftedTrainer(FsdpTrainer):
    """Trainer with wrong positions in the second of several context ranks, after the check at its start."""

    def setup_for_scoring(self, checkpoint: Path | None = None) -> RankCoordinates:
        place = super().setup_for_scoring(checkpoint)
        usual = attention.split_for_context_parallel

        def shifted(pack: Any, size: int, rank: int, **options: Any) -> Any:
            shard = usual(pack, size, rank, **options)
            if rank == 1:
                shard.position_ids = shard.position_ids + 2
            return shard

        attention.split_for_context_parallel = shifted
        return place


class RoundedTrainer(FsdpTrainer):
    """Trainer with matrices in FP8 if ``trainer.fp8`` asks for it. The real one needs a GPU."""

    def _machine_problems(self) -> list[str]:
        return []

    def setup_for_scoring(self, checkpoint: Path | None = None) -> RankCoordinates:
        place = super().setup_for_scoring(checkpoint)
        for parameter in self.model.parameters() if self.config.trainer.fp8 != "none" else ():
            matrix = shard_of(parameter).detach()
            if matrix.ndim == 2:
                matrix.copy_(dequantize(*quantize(matrix)))
        return place


ENGINES = {"transformers": TransformersEngine, "reversing": ReversingEngine, "perturbed": PerturbedEngine}
TRAINERS = {"fsdp": FsdpTrainer, "megatron": MegatronTrainer, "exact": ExactTrainer, "shifted": ShiftedTrainer}
TRAINERS["rounded"] = RoundedTrainer


def install(site: Path) -> None:
    """Write the entry points of a package with these engines and trainers to ``site``."""
    directory = site / "faulty-1.0.dist-info"
    directory.mkdir(parents=True)
    (directory / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    groups = {"engines": [*ENGINES.items()][1:], "backends": [*TRAINERS.items()][2:]}
    (directory / "entry_points.txt").write_text(
        "".join(
            f"[slime_like.{group}]\n" + "".join(f"{name} = {__name__}:{kind.__name__}\n" for name, kind in items)
            for group, items in groups.items()
        )
    )


@dataclass
class Case:
    """A run with a fault.

    Attributes:
        cause, name: cause in the table, and in a sentence.
        finding: part of what is found.
        flags: settings.
        sampling: what the engine sampled with, instead of the settings.
        seen: the prompt that it saw, instead of the row's.
        recorded: the row that was saved, instead of what the engine returned.
        synced: whether the weights came by a sync.
        step: step of the batch.
        fp8: ``trainer.fp8``, which flags accept only for Megatron.
    """

    cause: str
    finding: str
    flags: Sequence[str] = ()
    name: str = ""
    family: str = "qwen3"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seen: Callable[[list[int]], list[int]] = lambda ids: ids
    recorded: Callable[[ScoredTrajectory], ScoredTrajectory] = lambda row: row
    synced: bool = False
    step: int = 1
    fp8: str = "none"


CASES = {
    "stale weights": Case(
        "staleness",
        "100% of the tokens are of version 0, the trainer's is 1",
        ["--trainer.backend", "megatron"],
        step=2,
    ),
    "ignored temperature": Case(
        "temperature",
        "the trainer's logprobs are at temperature 0.7, the engine's at 1",
        ["--rollout.temperature", "0.7"],
        sampling={"temperature": 1.0},
    ),
    "lost supports": Case(
        "truncation",
        "the rows have no supports",
        ["--rollout.top_k", "4", "--cluster.placement", "colocated"],
        recorded=lambda row: replace(row, support_ids=None, support_sizes=None),
    ),
    "added BOS": Case("ids", "the engine saw another BOS", seen=lambda ids: [BOS, *ids]),
    "other template": Case(
        "ids",
        "9 of 9 prompts have other ids if they are encoded again",
        recorded=lambda row: replace(row, prompt_tokens=row.prompt_tokens[1:], prompt_len=row.prompt_len - 1),
    ),
    "8-bit weights": Case(
        "quantization",
        "engines sampled with 8-bit weights (fp8_blocks)",
        ["--sync.quantization", "fp8_blocks", "--algorithm.importance.correction", "truncate"],
        synced=True,
    ),
    "reversed tensor": Case("weights", "", ["--rollout.engine", "reversing"], synced=True),
    "perturbed routers": Case(
        "routing",
        "the engine chooses other experts in layers 1 to 2",
        ["--rollout.engine", "perturbed", "--rollout.max_new_tokens", "32"],
        "routing in layers 1 to 2",
        "qwen3_moe",
    ),
    "shifted positions": Case(
        "layout",
        "one rank gives other logprobs than 2",
        ["--trainer.backend", "shifted", "--trainer.parallel.context", "2"],
    ),
    "FP8 products": Case(
        "fp8", "the trainer rounds factors of products to FP8", ["--trainer.backend", "rounded"], fp8="blockwise"
    ),
    "bfloat16 experts": Case(
        "precision",
        "both in float32 instead of bfloat16",
        ["--model.dtype", "bfloat16", "--rollout.max_new_tokens", "32"],
        family="qwen3_moe",
    ),
    "bfloat16 engine": Case(
        "precision", "both in float32 instead of bfloat16", ["--trainer.backend", "exact", "--model.dtype", "bfloat16"]
    ),
}


def make_run(case: Case, tiny: Tiny, run_dir: Path) -> None:
    """Write what a run leaves: its configuration, and rows that an engine sampled."""
    run_dir.mkdir()
    if case.family != "qwen3":
        make_tiny_model(run_dir / "model", case.family)
        tiny = Tiny(run_dir / "model", tiny.data)
    _, file, *flags = tiny.rl_flags(run_dir, "--rollout.engine", "transformers", "--trainer.backend", "fsdp")
    config = load_config(Path(file), [*flags, "--debug.save_rollouts", str(run_dir / "rollouts"), *case.flags])
    save_config(config, run_dir / "config.yaml")
    prompts = PromptSource(config.data.train, load_tokenizer(tiny.model), config.data, config.seed).next(3)
    save_trajectories(
        dump_path(run_dir / "rollouts", case.step), list(map(case.recorded, _sampled(case, config, prompts)))
    )


def _sampled(case: Case, config: RunConfig, prompts: Sequence[Prompt]) -> list[ScoredTrajectory]:
    sampling: SamplingParams = replace(training_sampling(config.rollout, config.model), **case.sampling)
    requests = [
        replace(request, prompt=PromptInput(case.seen(list(request.prompt.token_ids))))
        for request in build_requests(prompts, sampling, num_samples=3, seed=0, label="train")
    ]
    engine = ENGINES[config.rollout.engine](config, 0)
    with start_engine(engine) as loop:
        driven = DrivenEngine(engine, loop)
        if case.synced:
            driven.version = -1
            bucket = WeightBucket(list(ReferenceModel(config.model.path).weights.items()))
            if config.sync.quantization != "none":
                (bucket,) = quantize_export(WeightExport(None, iter([bucket]))).buckets
            driven.run(driven.update(dict(bucket.tensors), buckets=1))
        answers = driven.generate_all(requests)
        driven.close()
    groups = [to_group(*each, config.rollout.temperature) for each in zip(prompts, answers, strict=True)]
    scores: dict[str, Any] = {"rewards": torch.zeros(0), "successes": torch.zeros(0)}
    scores |= {"advantages": torch.tensor(0.0), "reward_metadata": {"func_names": []}}
    return [ScoredTrajectory.of(row, **scores) for group in groups for row in group.trajectories]
