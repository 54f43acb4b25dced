"""Speculative decoding in vLLM: the claims of every engine hold, also while n-grams of the prompt are drafted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.vllm.engine import VllmEngine
from slime_like.verification.engine.claims import CLAIMS, Claim, truncated_sampling
from slime_like.verification.engine.subject import TOKENS, ReferenceModel, Subject
from tests.engines.harness import PRECISION, EngineUnderTest, check_logprobs, run_config, started

pytestmark = pytest.mark.acceptance
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
HOLDING = [claim for claim in CLAIMS if claim is not truncated_sampling]
"""``rollout.vllm.limits`` rejects truncated sampling with drafts."""


@pytest.fixture(scope="module")
def engine(references: list[ReferenceModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    arguments = {"speculative_config": DRAFTS}
    run_dir = tmp_path_factory.mktemp("run")
    config = run_config(references[0].directory, run_dir, dtype=PRECISION, engine="vllm", engine_args=arguments)
    with started(VllmEngine(config, 0), references) as under_test:
        yield under_test


@pytest.fixture(scope="module")
def repeating(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts whose n-grams occur again."""
    return [(prompt[:6] * 6)[: 20 + place] for place, prompt in enumerate(prompts[:4])]


@pytest.mark.parametrize("claim", HOLDING, ids=lambda claim: claim.__name__)
def test_claim(claim: Claim, engine: EngineUnderTest, models: list[Path], repeating: list[list[int]]) -> None:
    subject = Subject(engine, ReferenceModel(models[0], PRECISION), {}, repeating)
    subject.reference.use(engine.reference.weights)
    subject.others = engine.references[1 - engine.current].weights
    try:
        claim(subject)
    finally:
        engine.run(engine.load(engine.current))


@pytest.mark.parametrize("temperature", [0.0, 0.2, 0.7])
def test_accepted_tokens_have_the_logprobs_of_the_model(
    temperature: float, engine: EngineUnderTest, repeating: list[list[int]]
) -> None:
    """Drafts are accepted, rejected, and counted."""
    passes = accepted = 0
    for prompt in repeating:
        options = {"max_new_tokens": TOKENS, "num_samples": 4, "ignore_eos": True, "seed": 3}
        for generation in engine.generate(prompt, temperature=temperature, **options):
            check_logprobs(engine.reference, prompt, generation, temperature)
            passes, accepted = passes + generation.drafts[0], accepted + generation.drafts[1]
    assert 0 < accepted < 3 * passes
