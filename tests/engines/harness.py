"""An engine under test, with an event loop, a sender of weights, and Hugging Face's model as the reference."""

import asyncio
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pytest
import torch

from slime_like.config import (
    AlgorithmConfig,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RewardFunction,
    RolloutConfig,
    RunConfig,
)
from slime_like.errors import EngineError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import Generation, Manifest, RolloutEngine, UpdateReceipt
from slime_like.verification.engine import subject
from slime_like.verification.engine.subject import DrivenEngine, ReferenceModel
from slime_like.weights.transport import TransportSettings
from slime_like.weights.transports.registry import open_sender

MAX_NEW_TOKENS = 700
PRECISION: Literal["float32", "bfloat16"] = "bfloat16" if torch.cuda.is_available() else "float32"
"""Type that engines compute in. On a GPU, float32 would use other kernels than training."""
RARE_ID = 263
"""Its logit is always 0, far below the largest, so it is never sampled at a low temperature."""


def run_config(
    model: Path,
    run_dir: Path,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    routing_replay: Any = "none",
    **rollout: Any,
) -> RunConfig:
    defaults: dict[str, Any] = {"start_timeout_s": 300, "request_timeout_s": 60, "samples_per_prompt": 4}
    return RunConfig(
        run_dir=run_dir,
        model=ModelConfig(path=model, dtype=dtype),
        data=DataConfig(max_prompt_tokens=100),
        rollout=RolloutConfig(**({"max_new_tokens": MAX_NEW_TOKENS} | defaults | rollout)),
        reward=RewardConfig(functions=(RewardFunction(name="math_verify"),)),
        # This advantage also accepts single samples.
        algorithm=AlgorithmConfig(advantage="reinforce_pp", routing_replay=routing_replay),
    )


def tiny_pair(family: str, root: Path, **sizes: Any) -> list[ReferenceModel]:
    """Return two models with different seeds."""
    directories = [root / f"model{seed}" for seed in (0, 1)]
    for seed, directory in enumerate(directories):
        make_tiny_model(directory, family, seed=seed, **sizes)
    return [ReferenceModel(directory) for directory in directories]


class EngineUnderTest(DrivenEngine):
    """An engine with the reference of its current weights."""

    def __init__(
        self, engine: RolloutEngine, references: Sequence[ReferenceModel], loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(engine, loop)
        self.references = references
        self.current = 0

    @property
    def reference(self) -> ReferenceModel:
        return self.references[self.current]

    @property
    def manifest(self) -> Manifest:
        return Manifest.of(self.reference.weights)

    @contextmanager
    def over(self, transport: str, settings: TransportSettings) -> Iterator[None]:
        """Use another transport for updates inside the block."""
        usual, self.sender = self.sender, open_sender(transport, f"engine-{uuid.uuid4().hex}", settings)
        try:
            self.run(self.engine.connect(transport, self.sender.rendezvous()))
            yield
        finally:
            self.sender.close()
            self.sender = usual

    async def load(self, which: int, buckets: int = 4) -> tuple[UpdateReceipt, dict[str, int]]:
        """Update to the weights of reference ``which``; return the receipt and the sent hashes."""
        receipt, sent = await self.update(self.references[which].weights, buckets)
        self.current = which
        return receipt, sent

    def close(self) -> None:
        """Stop the engine, and check that no process is left."""
        own = self.run(self.engine.health()).process_ids
        super().close()
        assert not (set(own) - {os.getpid()}) & set(psutil.pids())
        assert not self.run(self.engine.health()).alive
        with pytest.raises(EngineError):
            self.generate([3, 4], max_new_tokens=1)


@contextmanager
def started(engine: RolloutEngine, references: Sequence[ReferenceModel]) -> Iterator[EngineUnderTest]:
    with subject.start_engine(engine) as loop:
        under_test = EngineUnderTest(engine, references, loop)
        try:
            yield under_test
        finally:
            under_test.close()


def check_logprobs(
    reference: ReferenceModel, prompt: list[int], generation: Generation, temperature: float = 1.0
) -> None:
    assert len(generation.token_ids) == len(generation.logprobs) == len(generation.weight_versions)
    if len(generation.token_ids):
        expected = reference.logprobs(prompt, generation.token_ids, temperature)
        check_gaps(reference, generation.logprobs, expected, temperature)


def check_gaps(reference: ReferenceModel, found: np.ndarray, expected: np.ndarray, temperature: float = 1.0) -> None:
    """Require that logprobs (n,) of engine and reference differ only by rounding."""
    assert reference.gap(found, expected, temperature) <= reference.bound


def same_ids(
    reference: ReferenceModel, some: Sequence[Generation], others: Sequence[Generation]
) -> list[tuple[Generation, Generation]]:
    """Return the pairs of equal samples. In float32, all pairs must be equal."""
    pairs = list(zip(some, others, strict=True))
    assert reference.is_alike([(one.token_ids.tolist(), other.token_ids.tolist()) for one, other in pairs])
    return [(one, other) for one, other in pairs if np.array_equal(one.token_ids, other.token_ids)]
