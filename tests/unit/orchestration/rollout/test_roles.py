"""A role's queue on plain objects: requests, failures of workers, and restarts."""

import asyncio
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import torch

from slime_like.errors import TrainerError
from slime_like.interfaces import Scores
from slime_like.orchestration.rollout.roles import RoleQueue
from slime_like.orchestration.rollout.scoring import RewardedGroup
from slime_like.system.loop_thread import LoopThread
from slime_like.trajectory import GroupedUnscoredTrajectories, UnscoredTrajectory
from tests.support.rejections import Rejects


def group(number: int, samples: int = 2, length: int = 8) -> RewardedGroup:
    prompt = torch.tensor([1, 2])
    trajectories = [
        UnscoredTrajectory.unsampled(
            f"{number}-{i}", prompt, torch.full((length - 2,), 10 * number + i), group_id=number
        )
        for i in range(samples)
    ]
    rewards = torch.zeros(samples, 1)
    grouped = GroupedUnscoredTrajectories(trajectories, number, samples * length, trajectories[0].prompt_tokens)
    return RewardedGroup(grouped, rewards, rewards, rewards[:, 0], [{}] * samples, [{}] * samples)


class Worker:
    """Worker with minus the token as a token's logprob. It waits for ``may_work``, and fails if ``fails`` is set."""

    def __init__(self, name: str, may_work: bool = True) -> None:
        self.name = name
        self.requests: list[list[int]] = []
        self.fails = False
        self.closed = threading.Event()
        self.fatal_starts = 0
        self.weights: Path | None = None
        self.scored_with: list[Path | None] = []
        self.may_work = threading.Event()
        if may_work:
            self.may_work.set()

    def score(self, trajectories: list[UnscoredTrajectory]) -> list[Scores]:
        self.scored_with.append(self.weights)
        self.requests.append(list(dict.fromkeys(t.group_id for t in trajectories)))
        assert self.may_work.wait(30)
        if self.fails:
            raise TrainerError(f"{self.name} rank 0 died while scoring")
        return [{"ref_logprobs": -t.response_tokens.float()} for t in trajectories]

    def use(self, weights: Path) -> None:
        self.weights = weights

    def restart(self, weights: Path | None) -> None:
        self.weights = weights
        if self.fatal_starts:
            self.fatal_starts -= 1
            raise TrainerError(f"{self.name} rank 0 gave no answer while setting up")
        self.fails = False

    def close(self) -> None:
        self.closed.set()


class Queue(RoleQueue):
    """A queue with the groups that it has not returned."""

    def __init__(self, role: str, request_tokens: int, max_restarts: int = 0) -> None:
        super().__init__(role, request_tokens, max_restarts)
        self.thread = LoopThread()
        self.waiting: list[Future[RewardedGroup]] = []

    def submit(self, *groups: RewardedGroup) -> None:
        self.waiting += [self.thread.start(self.score(group)) for group in groups]
        self.thread.run(asyncio.sleep(0))

    def scored(self) -> list[RewardedGroup]:
        """Return all groups once they are scored."""
        waiting, self.waiting = self.waiting, []
        return [future.result(30) for future in waiting]

    def close(self) -> None:
        super().close()
        self.thread.close()


def check(found: list[RewardedGroup], numbers: range) -> None:
    assert [scored.group.group_id for scored in found] == list(numbers)
    for scored in found:
        for trajectory, scores in zip(scored.group.trajectories, scored.scores, strict=True):
            assert torch.equal(scores["ref_logprobs"], -trajectory.response_tokens.float())


def wait_for_request(worker: Worker) -> None:
    deadline = time.monotonic() + 30
    while not worker.requests and time.monotonic() < deadline:
        time.sleep(0.001)


def queue_of(*workers: Worker, request_tokens: int = 16, max_restarts: int = 0) -> Queue:
    queue = Queue("reference", request_tokens, max_restarts)
    for worker in workers:
        queue.join(worker)
    return queue


def test_every_group_gets_its_logprobs() -> None:
    queue = queue_of(Worker("one"), Worker("two"), request_tokens=40)
    queue.submit(*(group(number, samples=1 + number % 3, length=4 + number % 5) for number in range(20)))
    check(queue.scored(), range(20))
    work = queue.take_work(9.0)
    prefix, responses = "ref_actor_performance", sum((1 + n % 3) * (2 + n % 5) for n in range(20))
    assert work[f"{prefix}/response_tokens_processed"] == responses
    assert work[f"{prefix}/total_tokens_processed"] == responses + 2 * sum(1 + n % 3 for n in range(20))
    assert work[f"{prefix}/time_model_running (s)"] > 0
    assert queue.take_work(9.0)[f"{prefix}/total_tokens_processed"] == 0
    queue.close()


def test_a_group_collects_the_scores_of_every_role() -> None:
    class Teacher(Worker):
        def score(self, trajectories: list[UnscoredTrajectory]) -> list[Scores]:
            return [{"teacher_logprobs": t.response_tokens.float()} for t in trajectories]

    found = [group(0, samples=3)]
    for queue in (queue_of(Worker("one")), queue_of(Teacher("two"))):
        queue.submit(*found)
        found = queue.scored()
        queue.close()
    check(found, range(1))
    for trajectory, scores in zip(found[0].group.trajectories, found[0].scores, strict=True):
        assert torch.equal(scores["teacher_logprobs"], trajectory.response_tokens.float())


def test_a_free_worker_takes_the_next_groups_that_fit_a_request() -> None:
    """A request of at most 40 tokens holds two groups of 16. All others wait until a worker is free."""
    workers = [Worker("one", False), Worker("two", False)]
    queue = queue_of(workers[0], request_tokens=40)
    queue.submit(group(0, length=16))
    wait_for_request(workers[0])
    queue.submit(*map(group, range(1, 9)))
    queue.join(workers[1])
    wait_for_request(workers[1])
    assert [worker.requests for worker in workers] == [[[0]], [[1, 2]]]
    for worker in workers:
        worker.may_work.set()
    check(queue.scored(), range(9))
    assert sorted(workers[0].requests[1:] + workers[1].requests[1:]) == [[3, 4], [5, 6], [7, 8]]
    queue.close()


def test_groups_of_a_failed_worker_are_scored_by_others() -> None:
    bad, good = Worker("bad", False), Worker("good", False)
    queue = queue_of(bad, good)
    queue.submit(*map(group, range(6)))
    bad.fails = True
    bad.may_work.set()
    assert bad.closed.wait(30)
    good.may_work.set()
    check(queue.scored(), range(6))
    assert queue.news == ["bad left the logprob pool (bad rank 0 died while scoring)"]
    assert len(good.requests) == 6 and len(bad.requests) == 1
    queue.close()


def test_a_failed_worker_restarts_and_gets_its_groups_again(rejects: Rejects) -> None:
    """Groups wait for the only worker. Its first two restarts fail, and every restart counts."""
    bad = Worker("bad")
    bad.fails, bad.fatal_starts = True, 2
    queue = queue_of(bad, max_restarts=3)
    queue.submit(*map(group, range(4)))
    check(queue.scored(), range(4))
    assert bad.requests[:2] == [[0], [0]]
    assert queue.news == [
        "bad left the logprob pool (bad rank 0 died while scoring)",
        *["bad did not start again (bad rank 0 gave no answer while setting up)"] * 2,
        "bad was restarted",
    ]
    assert not bad.closed.is_set()
    bad.fails = True  # no restart is left
    queue.submit(group(4))
    with rejects(TrainerError, "no-reference-worker"):
        queue.scored()
    assert bad.closed.wait(30)
    queue.submit(group(5))
    with rejects(TrainerError, "no-reference-worker"):
        queue.scored()
    queue.close()


def test_a_worker_whose_restarts_all_fail_ends_the_run(rejects: Rejects) -> None:
    bad = Worker("bad")
    bad.fails, bad.fatal_starts = True, 9
    queue = queue_of(bad, max_restarts=2)
    queue.submit(group(0))
    with rejects(TrainerError, "no-reference-worker"):
        queue.scored()
    assert bad.fatal_starts == 7 and bad.closed.wait(30)
    queue.close()


def test_aborted_groups_are_not_scored() -> None:
    """Whether they wait or a worker has them. Those that wait for a closed queue fail."""
    worker = Worker("one", False)
    queue = queue_of(worker)
    queue.submit(*map(group, range(3)))
    wait_for_request(worker)
    for future in queue.waiting:
        future.cancel()
    queue.waiting.clear()
    queue.thread.run(asyncio.sleep(0.01))
    queue.submit(group(3))
    worker.may_work.set()
    check(queue.scored(), range(3, 4))
    assert worker.requests == [[0], [3]]
    queue.close()


def test_requests_after_a_refresh_use_the_new_weights() -> None:
    """So does a worker that restarts. The queue reports weights that may be in use."""
    worker = Worker("one")
    queue = queue_of(worker, max_restarts=1)
    for number, weights in enumerate((None, Path("step-2"), Path("step-4"))):
        if weights is not None:
            queue.use(weights)
        worker.fails = number == 2
        queue.submit(group(number))
        check(queue.scored(), range(number, number + 1))
    assert worker.scored_with == [None, Path("step-2"), Path("step-4"), Path("step-4")]
    assert queue.in_use() == set()
    with queue._reading() as weights:
        queue.use(Path("step-6"))
        assert weights == Path("step-4") and queue.in_use() == {Path("step-4")}
    queue.close()
