"""One engine of two ranks on a CPU: the same answers as one, and every rank receives an update whole.

Its model has a head that is the embedding, and biases: the conformance tests' model has neither.
"""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from rollout.sglang.engine import SglangEngine
from rollout.vllm.engine import VllmEngine
from slime_like.errors import WeightSyncError
from tests.engines.harness import EngineUnderTest, Reference, run_config
from tests.engines.test_conformance import NO_STOP, check_logprobs, flip_a_bit


@pytest.fixture(scope="module", params=[SglangEngine, VllmEngine])
def two_ranks(
    request: pytest.FixtureRequest,
    tied: list[Path],
    tied_references: list[Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineUnderTest]:
    loop = asyncio.new_event_loop()
    engine = request.param(run_config(tied[0], tmp_path_factory.mktemp("run"), tensor=2), 0)
    loop.run_until_complete(engine.start())
    wrapped = EngineUnderTest(engine, tied_references, loop)
    yield wrapped
    wrapped.close()
    loop.close()


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
