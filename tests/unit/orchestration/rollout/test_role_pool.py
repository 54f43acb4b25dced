"""A role's pool on plain objects: requests, failures of workers, and restarts."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from slime_like.data.prompts import Prompt
from slime_like.errors import TrainerError
from slime_like.interfaces import GenerationRequest, PromptInput, SamplingParams, Scores
from slime_like.orchestration.rollout.group_store import GroupTask
from slime_like.orchestration.rollout.role_pool import RolePool
from slime_like.orchestration.rollout.scoring import RewardedGroup
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


class Pool(RolePool):
    """A pool with the groups that it has not scored."""

    def __init__(self, role: str, request_tokens: int, max_restarts: int = 0) -> None:
        super().__init__(role, request_tokens, max_restarts)
        self.tasks: list[GroupTask] = []

    def __len__(self) -> int:
        return len(self.tasks)

    def submit(self, group: RewardedGroup) -> None:
        request = GenerationRequest("", PromptInput([1, 2]), SamplingParams())
        task = GroupTask(request, prompt=Prompt(PromptInput([1, 2]), "", group.group.group_id, 0, 0), version=0)
        task.samples, task.rewarded = group.group, group
        self.tasks.append(task)

    def scored(self, timeout_s: float) -> list[RewardedGroup]:
        finished = self.poll(self.tasks, timeout_s)
        self.tasks = [task for task in self.tasks if task not in finished]
        return [task.rewarded for task in finished]


def drain(pool: Pool) -> Iterator[RewardedGroup]:
    deadline = time.monotonic() + 30
    while len(pool):
        assert time.monotonic() < deadline
        yield from pool.scored(1.0)


def check(found: list[RewardedGroup], numbers: range) -> None:
    assert sorted(scored.group.group_id for scored in found) == list(numbers)
    for scored in found:
        for trajectory, scores in zip(scored.group.trajectories, scored.scores, strict=True):
            assert torch.equal(scores["ref_logprobs"], -trajectory.response_tokens.float())


def test_every_group_gets_its_logprobs() -> None:
    pool = Pool("reference", request_tokens=40)
    pool.join(Worker("one"))
    pool.join(Worker("two"))
    for number in range(20):
        pool.submit(group(number, samples=1 + number % 3, length=4 + number % 5))
    check(list(drain(pool)), range(20))
    work = pool.take_work(9.0)
    prefix, responses = "ref_actor_performance", sum((1 + n % 3) * (2 + n % 5) for n in range(20))
    assert work[f"{prefix}/response_tokens_processed"] == responses
    assert work[f"{prefix}/total_tokens_processed"] == responses + 2 * sum(1 + n % 3 for n in range(20))
    assert work[f"{prefix}/time_model_running (s)"] > 0
    assert pool.take_work(9.0)[f"{prefix}/total_tokens_processed"] == 0
    pool.close()


def test_a_group_collects_the_scores_of_every_role() -> None:
    class Teacher(Worker):
        def score(self, trajectories: list[UnscoredTrajectory]) -> list[Scores]:
            return [{"teacher_logprobs": t.response_tokens.float()} for t in trajectories]

    found = [group(0, samples=3)]
    for pool, worker in ((Pool("reference", 40), Worker("one")), (Pool("teacher", 40), Teacher("two"))):
        pool.join(worker)
        for each in found:
            pool.submit(each)
        found = list(drain(pool))
        pool.close()
    check(found, range(1))
    for trajectory, scores in zip(found[0].group.trajectories, found[0].scores, strict=True):
        assert torch.equal(scores["teacher_logprobs"], trajectory.response_tokens.float())


def test_a_free_worker_takes_the_next_groups_that_fit_a_request() -> None:
    """A request of at most 40 tokens holds two groups of 16. All others wait until a worker is free."""

    def wait_for_request(worker: Worker) -> None:
        deadline = time.monotonic() + 30
        while not worker.requests and time.monotonic() < deadline:
            time.sleep(0.001)

    pool, workers = Pool("reference", request_tokens=40), [Worker("one", False), Worker("two", False)]
    pool.submit(group(0, length=16))
    pool.join(workers[0])
    assert pool.scored(0.0) == []
    wait_for_request(workers[0])
    pool.join(workers[1])
    for number in range(1, 9):
        pool.submit(group(number))
    assert pool.scored(0.0) == [] and len(pool) == 9
    wait_for_request(workers[1])
    assert [worker.requests for worker in workers] == [[[0]], [[1, 2]]]
    for worker in workers:
        worker.may_work.set()
    check(list(drain(pool)), range(9))
    assert sorted(workers[0].requests[1:] + workers[1].requests[1:]) == [[3, 4], [5, 6], [7, 8]]
    pool.close()


def test_groups_of_a_failed_worker_are_scored_by_others() -> None:
    pool, bad, good = Pool("reference", request_tokens=16), Worker("bad", False), Worker("good", False)
    pool.join(bad)
    pool.join(good)
    for number in range(6):
        pool.submit(group(number))
    assert pool.scored(0.0) == []
    bad.fails = True
    bad.may_work.set()
    assert pool.scored(30) == [] and len(pool) == 6
    good.may_work.set()
    check(list(drain(pool)), range(6))
    assert bad.closed.wait(30)
    assert pool.news == ["bad left the logprob pool (bad rank 0 died while scoring)"]
    assert len(good.requests) == 6 and len(bad.requests) <= 2
    late = Worker("late")
    pool.join(late)
    pool.submit(group(6))
    check(list(drain(pool)), range(6, 7))
    pool.close()


def test_a_failed_worker_restarts_and_gets_its_groups_again(rejects: Rejects) -> None:
    """Groups wait for the only worker. Its first two restarts fail, and every restart counts."""
    pool, bad = Pool("reference", request_tokens=16, max_restarts=3), Worker("bad")
    bad.fails, bad.fatal_starts = True, 2
    pool.join(bad)
    for number in range(4):
        pool.submit(group(number))
    check(list(drain(pool)), range(4))
    assert pool.news == [
        "bad left the logprob pool (bad rank 0 died while scoring)",
        *["bad did not start again (bad rank 0 gave no answer while setting up)"] * 2,
        "bad was restarted",
    ]
    assert not bad.closed.is_set()
    bad.fails = True  # no restart is left
    pool.submit(group(4))
    with rejects(TrainerError, "no-reference-worker"):
        list(drain(pool))
    assert bad.closed.wait(30)
    pool.close()


def test_a_worker_whose_restarts_all_fail_ends_the_run(rejects: Rejects) -> None:
    pool, bad = Pool("reference", request_tokens=16, max_restarts=2), Worker("bad")
    bad.fails, bad.fatal_starts = True, 9
    pool.join(bad)
    pool.submit(group(0))
    with rejects(TrainerError, "no-reference-worker"):
        list(drain(pool))
    assert bad.fatal_starts == 7 and bad.closed.wait(30)
    pool.close()


def waiting(worker: Worker, groups: int) -> Pool:
    """Return a pool of this worker alone, with groups that it may not score yet."""
    pool = Pool("reference", request_tokens=16)
    pool.join(worker)
    for number in range(groups):
        pool.submit(group(number))
    assert pool.scored(0.0) == []
    return pool


def test_groups_scored_before_the_last_worker_died_are_returned(rejects: Rejects) -> None:
    class Mortal(Worker):
        def score(self, trajectories: list[UnscoredTrajectory]) -> list[Scores]:
            self.fails = len(self.requests) == 2
            return super().score(trajectories)

    worker = Mortal("one", False)
    pool = waiting(worker, groups=4)
    worker.may_work.set()
    assert worker.closed.wait(30)
    check(pool.scored(0.0), range(2))
    with rejects(TrainerError, "no-reference-worker"):
        pool.scored(0.0)
    pool.close()


def test_groups_that_are_no_longer_polled_are_not_scored() -> None:
    """Groups of an aborted batch are dropped, whether they wait or a worker has them."""
    worker = Worker("one", False)
    pool = waiting(worker, groups=3)
    pool.tasks.clear()
    assert pool.scored(0.0) == []
    pool.submit(group(3))
    worker.may_work.set()
    check(list(drain(pool)), range(3, 4))
    assert worker.requests in ([[0], [3]], [[3]])
    pool.close()


def test_requests_after_a_refresh_use_the_new_weights() -> None:
    """So does a worker that restarts. The pool reports weights that may be in use."""
    pool, worker = Pool("reference", request_tokens=16, max_restarts=1), Worker("one")
    pool.join(worker)
    for number, weights in enumerate((None, Path("step-2"), Path("step-4"))):
        if weights is not None:
            pool.weights.use(weights)
        worker.fails = number == 2
        pool.submit(group(number))
        check(list(drain(pool)), range(number, number + 1))
    assert worker.scored_with == [None, Path("step-2"), Path("step-4"), Path("step-4")]
    assert pool.weights.in_use() == set()
    with pool.weights.reading() as weights:
        pool.weights.use(Path("step-6"))
        assert weights == Path("step-4") and pool.weights.in_use() == {Path("step-4")}
    pool.close()
