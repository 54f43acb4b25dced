"""One engine of two ranks on a CPU: the same answers as one, and every rank receives an update whole.

Its model has a head that is the embedding, and biases: the conformance tests' model has neither.
"""

from collections.abc import Iterator, Sequence

import psutil
import pytest

from rollout.sglang.engine import SglangEngine
from rollout.vllm.engine import VllmEngine
from slime_like.errors import WeightSyncError
from tests.engines.harness import EngineUnderTest, run_config, started, tiny_pair
from tests.engines.test_conformance import NO_STOP, check_logprobs, flip_a_bit


@pytest.fixture(scope="module", params=[SglangEngine, VllmEngine])
def two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    root = tmp_path_factory.mktemp("tied")
    references = tiny_pair("qwen2", root)
    assert "lm_head.weight" not in references[0].weights
    assert "model.layers.0.self_attn.q_proj.bias" in references[0].weights
    config = run_config(references[0].directory, root / "run", tensor=2)
    with started(request.param(config, 0), references) as engine:
        yield engine


def test_two_ranks_sample_update_and_find_damage(two_ranks: EngineUnderTest, prompts: list[list[int]]) -> None:
    def sample() -> None:
        for prompt in prompts[:3]:
            for generation in two_ranks.generate(prompt, max_new_tokens=16, num_samples=2, stop_token_ids=NO_STOP):
                check_logprobs(two_ranks.reference, prompt, generation)

    async def damaged() -> None:
        await two_ranks.engine.begin_update(two_ranks.version + 1)
        await two_ranks.send(list(two_ranks.reference.weights.items()), tamper=lambda m: flip_a_bit(two_ranks, m))

    sample()
    receipt, sent = two_ranks.run(two_ranks.load(1))
    assert receipt.checksums == sent
    sample()
    with pytest.raises(WeightSyncError, match="arrived damaged"):
        two_ranks.run(damaged())
    if isinstance(two_ranks.engine, VllmEngine):  # so it is where the damage came to one worker only
        two_ranks.run(two_ranks.engine._core.workers("start_weight_update"))
    two_ranks.run(two_ranks.load(0))
    sample()
    process_ids = two_ranks.run(two_ranks.engine.health()).process_ids
    assert len(process_ids) == 3  # the engine's own, and one per rank
    assert listening_addresses(process_ids) == {"127.0.0.1"}


def listening_addresses(process_ids: Sequence[int]) -> set[str]:
    connections = [c for pid in process_ids for c in psutil.Process(pid).net_connections(kind="tcp")]
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}
