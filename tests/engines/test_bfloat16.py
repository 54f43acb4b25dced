"""The transformers engine in bfloat16: close to the same weights computed in float32, and updated bit for bit.

The judge rounds weights alone; the engine also rounds every activation to 8 bits, which is all that may differ.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout.transformers.engine import TransformersEngine
from tests.engines.harness import EngineUnderTest, Reference, run_config
from tests.engines.test_conformance import NO_STOP

LARGEST, MEAN = 0.25, 0.03
"""Nats per token: twice what was seen at temperature 0.7. Another model's logprobs are 1.3 away in the mean."""


@pytest.fixture(scope="module")
def judges(models: list[Path]) -> list[Reference]:
    return [Reference(model, rounded_to=torch.bfloat16) for model in models]


@pytest.fixture(scope="module")
def engine(
    models: list[Path], judges: list[Reference], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineUnderTest]:
    loop = asyncio.new_event_loop()
    under_test = TransformersEngine(run_config(models[0], tmp_path_factory.mktemp("run"), dtype="bfloat16"), 0)
    loop.run_until_complete(under_test.start())
    wrapped = EngineUnderTest(under_test, judges, loop)
    yield wrapped
    wrapped.close()
    loop.close()


def gaps(engine: EngineUnderTest, judge: Reference, prompts: list[list[int]], temperature: float) -> np.ndarray:
    """|engine - judge| of every sampled token's logprob, all prompts in one batch."""
    requests = [
        engine.request(p, temperature=temperature, max_new_tokens=24, num_samples=2, seed=i, stop_token_ids=NO_STOP)
        for i, p in enumerate(prompts)
    ]
    return np.concatenate(
        [
            np.abs(generation.logprobs - judge.logprobs(prompt, generation.token_ids, temperature))
            for prompt, generations in zip(prompts, engine.generate_all(requests), strict=True)
            for generation in generations
        ]
    )


def test_logprobs_and_an_update(engine: EngineUnderTest, judges: list[Reference], prompts: list[list[int]]) -> None:
    for which in (0, 1):
        if which:
            receipt, sent = engine.run(engine.load(which))
            assert receipt.checksums == sent
        held = engine.engine._destinations  # type: ignore[attr-defined]
        for name, tensor in judges[which].weights.items():
            assert held[name].dtype == torch.bfloat16
            assert torch.equal(held[name].view(torch.int16), tensor.view(torch.int16)), name
        for temperature in (1.0, 0.7):
            found = gaps(engine, judges[which], prompts, temperature)
            assert found.max() < LARGEST and found.mean() < MEAN
        assert gaps(engine, judges[1 - which], prompts, 1.0).mean() > 10 * MEAN  # the bound tells models apart
