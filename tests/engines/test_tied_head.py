"""A head whose weight is the embedding's, and projections with biases: what the conformance tests' model has not.

Engines that pack weights for their products pack the head's apart, and are sent it under the embedding's name alone.
vLLM and SGLang have such a model on two ranks, in ``test_tensor_parallel.py``.
"""

import asyncio
from pathlib import Path

import numpy as np

from rollout.transformers.engine import TransformersEngine
from tests.engines.harness import TOLERANCE, EngineUnderTest, Reference, run_config


def test_an_update_reaches_the_head_and_the_biases(
    tied: list[Path], tied_references: list[Reference], tmp_path: Path
) -> None:
    loop = asyncio.new_event_loop()
    under_test = TransformersEngine(run_config(tied[0], tmp_path / "run"), 0)
    loop.run_until_complete(under_test.start())
    engine = EngineUnderTest(under_test, tied_references, loop)
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
