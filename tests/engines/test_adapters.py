"""The claims about engines, on engines that get only low-rank factors. The merged model is the reference."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.transformers.engine import TransformersEngine
from slime_like.config import LoraConfig, RunConfig
from slime_like.errors import WeightSyncError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import Manifest, UpdateReceipt
from slime_like.verification.engine.claims import CLAIMS, update_amid_requests
from slime_like.verification.engine.subject import DrivenEngine, ReferenceModel, Subject, start_engine
from slime_like.weights.adapter import ADAPTER, factor_names, factor_shapes
from tests.engines.conftest import ENGINES
from tests.engines.harness import PRECISION, run_config
from tests.support.rejections import Rejects

RANK = 6  # vLLM's next size is 8
CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "vllm": ("vllm", "qwen3", ("q_proj", "v_proj", "gate_proj", "down_proj")),
    "sglang": ("sglang", "qwen3_moe", ("q_proj", "v_proj", "o_proj")),
    "transformers": ("transformers", "qwen3", ("all-linear",)),
}
"""Engine, family and targets: parts of fused modules, attention of a mixture of experts, all matrices."""
Claim = Callable[[Subject], None]
OTHERS: list[Claim] = [
    each for each in CLAIMS if each.__name__ in ("greedy", "seeds", "stop_tokens", "unknown_fields", "abort_and_pause")
]
OF_FACTORS: list[Claim] = [each for each in CLAIMS if each not in OTHERS]


class MergedReference(ReferenceModel):
    """A model with factors in its weights. ``weights`` are the factors."""

    def __init__(self, directory: Path, lora: LoraConfig) -> None:
        super().__init__(directory, PRECISION)
        self.base, self._lora = self.weights, lora
        self.shapes = factor_shapes(lora, {name: tuple(tensor.shape) for name, tensor in self.base.items()})
        self.weights = self.factors(0)
        self.use({})

    def factors(self, seed: int) -> dict[str, Tensor]:
        """Return random factors; with seed 0, B is 0."""
        generator = torch.Generator().manual_seed(seed)
        values = {name: 0.08 * torch.randn(shape, generator=generator) for name, shape in self.shapes.items()}
        given = {name: value if seed or ".lora_A." in name else 0 * value for name, value in values.items()}
        return {name: value.to(getattr(torch, self.dtype)) for name, value in given.items()}

    def use(self, weights: Mapping[str, Tensor]) -> None:
        if not hasattr(self, "base"):
            super().use(weights)
            return
        factors, merged = {**self.weights, **weights}, dict(self.base)
        for name in self.base:
            a, b = factor_names(name)
            if a in factors:
                product = self._lora.alpha / RANK * factors[b].float() @ factors[a].float()
                merged[name] = (merged[name].float() + product).to(merged[name].dtype)
        self.weights = self.base
        super().use(merged)
        self.weights = factors


class AdaptedEngine(DrivenEngine):
    """An engine whose updates bring factors."""

    async def update(
        self, weights: Mapping[str, Tensor], *arguments: Any, manifest: Manifest | None = None, **options: Any
    ) -> tuple[UpdateReceipt, dict[str, int]]:
        manifest = replace(manifest or Manifest.of(weights), updates=ADAPTER)
        return await super().update(weights, *arguments, manifest=manifest, **options)


def with_factors(config: RunConfig, **lora: Any) -> RunConfig:
    settings = LoraConfig(rank=RANK, alpha=9.0, sync="adapter", **lora)
    return config.model_copy(update={"model": config.model.model_copy(update={"lora": settings})})


KINDS: list[Any] = ["vllm", "transformers", pytest.param("sglang", marks=pytest.mark.acceptance)]


@pytest.fixture(scope="module", params=KINDS)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]
) -> Iterator[Subject]:
    kind, family, targets = CASES[request.param]
    root = tmp_path_factory.mktemp(kind)
    make_tiny_model(root / "model", family, num_hidden_layers=2, max_position_embeddings=1024)
    config = with_factors(run_config(root / "model", root / "run", dtype=PRECISION), targets=targets)
    reference = MergedReference(root / "model", config.model.lora)
    engine = ENGINES[kind](config, 0)
    with start_engine(engine) as loop:
        under_test = AdaptedEngine(engine, loop)
        yield Subject(under_test, reference, reference.factors(1), prompts[:4])
        under_test.close()


def test_the_base_is_served_before_the_first_factors(subject: Subject) -> None:
    """Requests that began with it continue with the factors."""
    assert subject.probe() < subject.reference.bound
    update_amid_requests(subject)
    assert subject.probe() < subject.reference.bound


@pytest.mark.parametrize("claims", [OF_FACTORS, pytest.param(OTHERS, marks=pytest.mark.acceptance)])
def test_claims(subject: Subject, claims: Sequence[Claim]) -> None:
    assert isinstance(subject.reference, MergedReference)
    subject.load(subject.reference.factors(2))
    subject.others = subject.reference.factors(3)
    for claim in claims:
        claim(subject)
        subject.load(subject.reference.factors(2))


def test_the_base_cannot_be_updated(subject: Subject, rejects: Rejects) -> None:
    """Merged weights would count the product twice. After the rejection, factors are needed again."""
    assert isinstance(subject.reference, MergedReference)
    merged = Manifest.of(subject.reference.base)
    with rejects(WeightSyncError, "update-target"):
        subject.engine.run(subject.engine.engine.begin_update(99, merged))
    subject.load(subject.reference.factors(1))
    assert subject.probe() < subject.reference.bound


def test_a_restarted_engine_has_the_base(models: list[Path], tmp_path: Path) -> None:
    config = with_factors(run_config(models[0], tmp_path / "run"))
    reference = MergedReference(models[0], config.model.lora)
    engine = TransformersEngine(config, 0)
    with start_engine(engine) as loop:
        first = AdaptedEngine(engine, loop)
        Subject(first, reference, {}, [[3, 4, 5]]).load(reference.factors(1))
        first.close()
        loop.run_until_complete(asyncio.wait_for(engine.start(), 60))
        again = AdaptedEngine(engine, loop)
        reference.use(reference.factors(0))
        assert Subject(again, reference, {}, [[3, 4, 5]]).probe() < reference.bound
        again.close()
