"""A head whose weight is the embedding's, and projections with biases: what the conformance tests' model has not.

Engines that pack weights for their products pack the head's apart, and are sent it under the embedding's name alone.
"""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from slime_like.examples.tiny_model import make_tiny_model
from tests.engines.conftest import ENGINES
from tests.engines.harness import TOLERANCE, EngineUnderTest, Reference, run_config


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("tied")
    for seed in (0, 1):
        make_tiny_model(root / f"model{seed}", family="qwen2", seed=seed)
    return [root / "model0", root / "model1"]


@pytest.mark.parametrize("name", ENGINES)
def test_an_update_reaches_the_head_and_the_biases(name: str, tied: list[Path], tmp_path: Path) -> None:
    references = [Reference(model) for model in tied]
    assert "lm_head.weight" not in references[0].weights
    assert "model.layers.0.self_attn.q_proj.bias" in references[0].weights
    loop = asyncio.new_event_loop()
    under_test = ENGINES[name](run_config(tied[0], tmp_path / "run"), 0)
    loop.run_until_complete(under_test.start())
    engine = EngineUnderTest(under_test, references, loop)
    try:
        prompt = [7 + 3 * i % 240 for i in range(40)]
        for which in (0, 1, 0):
            if which != engine.current:
                engine.run(engine.load(which))
            (generation,) = engine.generate(prompt, max_new_tokens=4, prompt_logprobs=True, seed=1)
            expected = engine.reference.logprobs(prompt[:1], np.asarray(prompt[1:]), 1.0)
            assert generation.prompt_logprobs is not None
            assert np.abs(generation.prompt_logprobs - expected).max() < TOLERANCE
            sampled = engine.reference.logprobs(prompt, generation.token_ids, 1.0)
            assert np.abs(generation.logprobs - sampled).max() < TOLERANCE
    finally:
        engine.close()
        loop.close()
