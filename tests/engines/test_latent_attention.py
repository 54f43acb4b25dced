"""DeepSeek-V3's kind of model in engines: what serves it computes it, also after an update; what does not says so."""

import asyncio
from pathlib import Path

import pytest

from rollout.sglang.engine import SglangEngine
from rollout.transformers.engine import TransformersEngine
from slime_like.errors import EngineError
from slime_like.examples.tiny_model import make_tiny_model
from tests.engines.harness import EngineUnderTest, Reference, run_config
from tests.engines.test_conformance import NO_STOP, check_logprobs


def test_the_transformers_engine_samples_and_updates_it(tmp_path: Path) -> None:
    """Fused experts, shared ones, and the routers' bias, which is a buffer."""
    models = [tmp_path / f"model{seed}" for seed in (0, 1)]
    for seed, model in enumerate(models):
        make_tiny_model(model, "deepseek_v3", seed=seed)
    loop = asyncio.new_event_loop()
    engine = TransformersEngine(run_config(models[0], tmp_path / "run"), 0)
    loop.run_until_complete(engine.start())
    under_test = EngineUnderTest(engine, [Reference(model) for model in models], loop)
    try:
        for _ in range(2):
            receipt, sent = under_test.run(under_test.load(1 - under_test.current))
            assert receipt.checksums == sent
            for generation in under_test.generate([5, 9, 33, 12], max_new_tokens=12, stop_token_ids=NO_STOP):
                check_logprobs(under_test.reference, [5, 9, 33, 12], generation)
    finally:
        under_test.close()
        loop.close()


def test_sglang_on_a_cpu_refuses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.sglang.engine.on_cpu", lambda: True)
    make_tiny_model(tmp_path / "model", "deepseek_v3")
    engine = SglangEngine(run_config(tmp_path / "model", tmp_path / "run"), 0)
    with pytest.raises(EngineError, match=r"latent attention .*; use rollout.engine=transformers there"):
        asyncio.run(engine.start())
