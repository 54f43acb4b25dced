"""How much hashing shows: judged by a simulation of both sides with and without it."""

import random

import pytest

from slime_like.weights.verification_cost import Round, exposed_seconds


def simulated(sends: list[float], loads: list[float]) -> tuple[float, list[float]]:
    """Length of a sync whose rounds take the slower of both sides, and the wait of each round."""
    waits = [max(0.0, load - send) for send, load in zip(sends, loads, strict=True)]
    return sum(max(send, load) for send, load in zip(sends, loads, strict=True)), waits


@pytest.mark.parametrize("seed", range(20))
def test_it_is_an_upper_bound_and_exact_where_engines_are_slower(seed: int) -> None:
    generator = random.Random(seed)
    count, slow = 6, seed % 2 == 0
    nbytes = [0] + [generator.randrange(1, 100) for _ in range(count - 1)]
    send_hash = [generator.random() for _ in range(count - 1)] + [0.0]
    sends = [hash_s + generator.random() for hash_s in send_hash[:-1]] + [0.0]
    engine_hash = [0.02 * size for size in nbytes]
    loads = [0.0] + [hash_s + generator.random() + (5.0 if slow else 0.0) for hash_s in engine_hash[1:]]

    with_hashing, waits = simulated(sends, loads)
    bare_sends = [send - hash_s for send, hash_s in zip(sends, send_hash, strict=True)]
    bare, _ = simulated(bare_sends, [load - hash_s for load, hash_s in zip(loads, engine_hash, strict=True)])
    rounds = [Round(*each) for each in zip(send_hash, waits, nbytes, strict=True)]
    found = exposed_seconds(rounds, sum(engine_hash))
    assert found >= with_hashing - bare - 1e-9
    if slow:
        assert found == pytest.approx(with_hashing - bare)
