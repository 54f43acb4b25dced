"""Routing by least outstanding tokens, on the plain object."""

from slime_like.orchestration.rollout.registry import WorkerRegistry


def registry(workers: int, capacity: int = 1000) -> WorkerRegistry:
    pool = WorkerRegistry(capacity)
    for worker in range(workers):
        pool.join(worker)
    return pool


def test_least_outstanding_tokens_wins() -> None:
    """A released worker is attractive again."""
    pool = registry(3)
    assert [pool.acquire(tokens) for tokens in (100, 10, 50, 5)] == [0, 1, 2, 1]
    pool.release(0, 100)
    assert pool.acquire(1) == 0


def test_capacity_is_a_hard_limit() -> None:
    pool = registry(2, capacity=1)
    assert pool.acquire(1) == 0
    assert pool.acquire(1) == 1
    assert pool.acquire(1) is None
    pool.release(0, 1)
    assert pool.acquire(1) == 0


def test_a_worker_that_left_gets_nothing_and_its_late_release_is_harmless() -> None:
    pool = registry(2)
    pool.acquire(10)
    pool.leave(0)
    pool.release(0, 10)
    assert [pool.acquire(1) for _ in range(3)] == [1, 1, 1]
