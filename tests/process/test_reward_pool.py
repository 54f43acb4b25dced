"""Reward workers: order, limits, replacement, and cleanup."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import uvloop

from slime_like.config import RewardConfig
from slime_like.config.rollout import RewardFunction
from slime_like.errors import RewardError
from slime_like.sandbox import pool as pools
from slime_like.sandbox.pool import WorkerProcess
from slime_like.sandbox.rewards import pool as rewards
from slime_like.sandbox.rewards.pool import RewardItem, RewardOutcome, RewardPool
from slime_like.system.processes import is_alive
from tests.process.conftest import wait_until
from tests.support.rejections import Rejects
from tests.support.reward_service import url as url

USER_MODULE = """
import json, os, signal, sys, time
from slime_like.interfaces import RewardResult

def key_of(text):
    return json.loads(text)["key"]

def act(prompt, response, answer, *, log=None):
    if log:
        with open(log, "a") as file:
            file.write(f"{os.getpid()} {prompt} {response}\\n")
    if response == "say and hang":
        print("thinking")
        time.sleep(1000)
    if response.startswith("hang"):
        time.sleep(1000)
    if response == "spin":
        10 ** (10 ** 10)
    if response == "exit":
        os._exit(7)
    if response == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if response == "memory":
        bytearray(10 ** 12)
    if response == "nan":
        return float("nan")
    if response == "raise":
        raise LookupError("no such thing")
    if response in ("nested", "deep"):
        key_of("{}" if response == "nested" else "")
    if response == "quit":
        sys.exit("no more")
    if response == "print":
        print("noise " * 1000)
        sys.stdout.flush()
        os.write(1, b"more noise")
    if response == "read":
        sys.stdin.read()
    return RewardResult(reward=float(len(response)), success=prompt == "good", metadata={"pid": os.getpid()})
"""

IMPORTS = "import os, signal\nfrom pathlib import Path\nfrom slime_like.interfaces.user_code import RewardResult\n"

Write = Callable[[str, str], Path]


@pytest.fixture(scope="module", autouse=True)
def user_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A custom reward function that misbehaves on demand, which workers can import."""
    file = tmp_path_factory.mktemp("user") / "user_rewards.py"
    file.write_text(USER_MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(file.parent))
        yield file


def user_config(workers: int = 1, timeout_s: float = 2.0, **options: str) -> RewardConfig:
    function = RewardFunction(name="user_rewards:act", options=options)
    return RewardConfig(functions=(function,), workers=workers, timeout_s=timeout_s, memory_mb=512)


@pytest.fixture(scope="module")
def pool(user_file: Path) -> Iterator[RewardPool]:
    with closing(RewardPool(user_config())) as pool:
        yield pool


@pytest.fixture(scope="module")
def math_pool() -> Iterator[RewardPool]:
    with closing(RewardPool(RewardConfig(timeout_s=1.5))) as pool:
        yield pool


def items(*responses: str, answer: str = "46", prompt: str = "good") -> list[RewardItem]:
    return [RewardItem(prompt, response, answer) for response in responses]


def test_what_a_function_prints_is_kept(tmp_path: Path) -> None:
    """Output before a kill is kept, too. Workers that print nothing leave no file."""
    logs = tmp_path / "logs"
    logs.mkdir()
    with closing(RewardPool(user_config(timeout_s=0.5), logs=logs)) as pool:
        pool.score(items("print", "say and hang"))
        pool.score(items("x"))
    (kept,) = logs.iterdir()
    assert kept.name == "reward-0.log" and kept.read_text().endswith("more noisethinking\n")


def test_order_is_kept_over_workers() -> None:
    with closing(RewardPool(user_config(workers=3))) as pool:
        pool.start()
        responses = ["x" * (i % 131) for i in range(700)]
        outcomes = pool.score(items(*responses))
        assert [outcome.rewards for outcome in outcomes] == [(float(len(r)),) for r in responses]
        assert {outcome.metadata["user_rewards:act"]["pid"] for outcome in outcomes} <= set(pool.process_ids)
        assert pool.score([]) == []


def test_every_function_gives_rewards_and_successes() -> None:
    functions = (
        RewardFunction(name="math_verify", weight=3.0),
        RewardFunction(name="format", options={"pattern": r"\d+"}),
        RewardFunction(name="length", options={"limit": 2}),
    )
    with closing(RewardPool(RewardConfig(functions=functions))) as pool:
        outcomes = pool.score(items("46", "45", "is 46"))
    assert [outcome.rewards for outcome in outcomes] == [(1.0, 1.0, 0.0), (0.0, 1.0, 0.0), (1.0, 0.0, -1.0)]
    assert [outcome.successes for outcome in outcomes] == [(1.0, 1.0, 1.0), (0.0, 1.0, 1.0), (1.0, 0.0, 0.0)]


# response, expected reason, and for an error its text and its line
MISDEEDS = [
    ("hang", "timeout", "", ""),
    ("spin", "timeout", "", ""),
    ("exit", "crash", "", ""),
    ("segfault", "crash", "", ""),
    ("memory", "memory", "", ""),
    ("raise", "error", "LookupError: no such thing", 'raise LookupError("no such thing")'),
    ("quit", "error", "SystemExit: no more", 'sys.exit("no more")'),
    ("nested", "error", "KeyError: 'key'", 'return json.loads(text)["key"]'),
    ("deep", "error", "JSONDecodeError: Expecting value: line 1 column 1 (char 0)", 'return json.loads(text)["key"]'),
]


@pytest.mark.parametrize(("response", "reason", "what", "line"), MISDEEDS, ids=[case[0] for case in MISDEEDS])
def test_a_failure_costs_only_its_sample_and_names_function_error_and_line(
    pool: RewardPool, user_file: Path, response: str, reason: str, what: str, line: str
) -> None:
    pool.start()
    first = set(pool.process_ids)
    outcomes = pool.score(items("a", "bb", response, "ccc", "dddd"))
    assert [outcome.rewards[0] for outcome in outcomes] == [1.0, 2.0, 0.0, 3.0, 4.0]
    assert outcomes[2].metadata["reason"] == reason
    assert outcomes[2].successes == (0.0,)
    replaced = reason in ("timeout", "crash")
    assert (set(pool.process_ids) != first) == replaced
    if replaced:
        assert not any(is_alive(pid) for pid in first)
    assert pool.score(items("ee"))[0].rewards == (2.0,)
    if what:
        [number] = [n for n, text in enumerate(USER_MODULE.splitlines(), start=1) if line in text]
        detail = f"{what} ({user_file}:{number})"
        assert outcomes[2].metadata == {"reason": "error", "function": "user_rewards:act", "detail": detail}


def test_output_input_and_ctrl_c_disturb_no_sample(pool: RewardPool) -> None:
    pool.start()
    (worker,) = pool.process_ids
    os.kill(worker, signal.SIGINT)
    metadata = {"user_rewards:act": {"pid": worker}}
    expected = [RewardOutcome((reward,), (1.0,), metadata) for reward in (5.0, 4.0, 3.0)]
    assert pool.score(items("print", "read", "abc")) == expected


def test_a_function_that_always_fails_ends_the_run(pool: RewardPool, rejects: Rejects) -> None:
    pool.score(items(*["raise"] * 50))  # one distinct item
    batch = [RewardItem(str(i), "raise", "46") for i in range(8)]
    with rejects(RewardError, "reward-function-fails") as caught:
        pool.score(batch)
    assert isinstance(caught.value, RewardError)
    assert 'raise LookupError("no such thing")' in (caught.value.users_traceback or "")
    assert pool.score([*batch, *items("good one")])[-1].rewards == (8.0,)
    pool.score(batch[:4])  # a call about few samples
    assert pool.score([*batch[:4], *items("good one")])[-1].rewards == (8.0,)
    pool.score(batch[:4])
    with rejects(RewardError, "reward-function-fails"):
        pool.score(batch[4:])
    assert pool.score(items("good one"))[0].rewards == (8.0,)


def test_one_prompt_whose_responses_all_fail_does_not_end_the_run(pool: RewardPool) -> None:
    """It may have many samples, and a call may be only about this prompt."""
    bad = [RewardItem("bad", response, "46") for response in ("raise", "nested", "deep", "quit") * 2]
    for _ in range(7):
        outcomes = pool.score(bad, ["bad"] * len(bad))
        assert {outcome.metadata["reason"] for outcome in outcomes} == {"error"}
    assert pool.score(items("good one"))[0].rewards == (8.0,)
    pool.score(bad, ["bad"] * len(bad))


def test_equal_items_are_scored_once(tmp_path: Path) -> None:
    """Custom functions may use the prompt, so equal responses to different prompts are different items."""
    log = tmp_path / "calls"
    with closing(RewardPool(user_config(log=str(log)))) as pool:
        outcomes = pool.score([*items("a", "b", "a"), *items("a", prompt="bad"), *items("a", answer="47")])
    assert [outcome.successes[0] for outcome in outcomes] == [1.0, 1.0, 1.0, 0.0, 1.0]
    assert len(log.read_text().splitlines()) == 4


HOSTILE = {
    "power tower": r"$10^{10^{10}}$",
    "factorial": r"\boxed{9999999!}",
    "nesting": "$" + "(" * 1000 + "1" + ")" * 1000 + "$",
    "fractions": "$" + r"\frac{1}{" * 500 + "1" + "}" * 500 + "$",
    "open brackets": "(" * 100_000,
    "digits": "9" * 1_000_000,
    "boxes": r"\boxed{" * 5000,
    "sum": "1+" * 50_000 + "1",
    "code": "__import__('os').system('touch /tmp/owned')",
    "zero bytes": "\x00" * 1000,
    "lone surrogate": "\ud800",
}


def test_hostile_answers_cost_their_own_samples(math_pool: RewardPool) -> None:
    outcomes = math_pool.score(items("46", *HOSTILE.values(), r"\boxed{46}"))
    assert [outcome.successes[0] for outcome in outcomes] == [1.0, *[0.0] * len(HOSTILE), 1.0]
    reasons = {
        name: outcome.metadata.get("reason", outcome.metadata.get("math_verify", {}).get("reason"))
        for name, outcome in zip(HOSTILE, outcomes[1:-1], strict=True)
    }
    assert all(reasons.values()), reasons
    assert reasons["nesting"] == "nested too deeply"
    assert outcomes[1 + list(HOSTILE).index("digits")].metadata["math_verify"]["cut_chars"] > 900_000


def test_hostile_answers_cost_a_step_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first may take the whole limit, the next a tenth, and the rest of the step is not scored."""
    monkeypatch.setattr(rewards, "_FULL_TIMEOUTS", 1)
    monkeypatch.setattr(rewards, "_MAX_TIMEOUTS", 2)
    towers = [rf"\boxed{{\{{{base}99999999!\}}}}" for base in range(2, 6)]  # a set of one number
    with closing(RewardPool(RewardConfig(timeout_s=3.0), step_responses=8)) as pool:
        pool.start()
        first = [pool.score(items(response))[0] for response in ("46", towers[0], "46", towers[1])]
        rest = pool.score(items(*towers[2:], "46", "45"))
        assert pool.score(items("46"))[0].rewards == (1.0,)
    assert [outcome.rewards for outcome in first] == [(1.0,), (0.0,), (1.0,), (0.0,)]
    fault = {"function": "math_verify", "fault": "response"}
    assert [first[1].metadata, first[3].metadata["reason"]] == [{"reason": "timeout", **fault}, "timeout"]
    assert all({**outcome.metadata, "detail": ""} == {"reason": "budget", "detail": "", **fault} for outcome in rest)
    assert {outcome.rewards for outcome in rest} == {(0.0,)}


ANSWER, FAULT, FAILURE = "an answer", "an answer that could not be scored", "a failure"
LOOP, PASS = "```python\nwhile True: pass\n```", "```python\nx = 1\n```"
KINDS = {
    "math_verify": [("45", "46", ANSWER), (r"\boxed{\{299999999!\}}", "46", FAULT), ("46", "(" * 30, FAILURE)],
    "code": [
        (PASS, "assert x == 2", ANSWER),
        (LOOP, "assert True", ANSWER),
        ("```python\nx = [0] * 10**10\n```", "assert True", ANSWER),
        (PASS, "def test(): pass", FAILURE),
    ],
    "http": [("plain", "", ANSWER), *((word, "", FAILURE) for word in ("busy", "text", "none", "slow"))],
    "unreachable": [("plain", "", FAILURE)],
    "user_rewards:act": [("x", "", ANSWER), *((word, "", FAILURE) for word in ("nan", "raise", "exit", "hang"))],
    # The first of two functions is included, and hangs on what the model wrote. The second hangs by itself.
    "format": [("x", "", ANSWER), ("a" * 50, "", FAULT), ("hang", "", FAILURE)],
}


@pytest.mark.parametrize("name", KINDS)
def test_a_failure_is_not_an_answer(url: str, name: str) -> None:
    """A policy must not escape a bad reward by what it writes, nor be punished for an outage."""
    functions = {
        "code": [RewardFunction(name="code", options={"timeout_s": 0.5, "memory_mb": 256})],
        "http": [RewardFunction(name="http", options={"url": url, "timeout_s": 0.5})],
        "unreachable": [RewardFunction(name="http", options={"url": "http://127.0.0.1:9", "timeout_s": 0.3})],
        "format": [
            RewardFunction(name="format", options={"pattern": "(a+)+b"}),
            RewardFunction(name="user_rewards:act"),
        ],
    }.get(name, [RewardFunction(name=name)])
    wanted = KINDS[name]
    with closing(RewardPool(RewardConfig(functions=functions, timeout_s=3.0, memory_mb=512))) as pool:
        outcomes = pool.score([RewardItem(f"p{n}", response, truth) for n, (response, truth, _) in enumerate(wanted)])
    found = [
        FAILURE if outcome.failed else FAULT if outcome.metadata.get("fault") == "response" else ANSWER
        for outcome in outcomes
    ]
    assert found == [kind for *_, kind in wanted]
    named = [{"reason", "function"} <= outcome.metadata.keys() for outcome in outcomes]
    assert named == [kind != ANSWER for kind in found]


def test_workers_import_neither_torch_nor_the_configuration_and_their_memory_is_limited(math_pool: RewardPool) -> None:
    math_pool.start()
    maps = Path(f"/proc/{math_pool.process_ids[0]}/maps").read_text()
    assert "pydantic" not in maps and "libc" in maps  # libraries show
    # not the OpenMP library in torch's directory, which an engine of this process may preload
    assert "libtorch" not in maps

    limits = Path(f"/proc/{math_pool.process_ids[0]}/limits").read_text()
    line = next(line for line in limits.splitlines() if line.startswith("Max address space"))
    assert 2048 * 2**20 < int(line.split()[3]) < 4096 * 2**20


def test_a_worker_that_died_idle_is_replaced() -> None:
    with closing(RewardPool(user_config(workers=2))) as pool:
        pool.start()
        victim = pool.process_ids[0]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: not is_alive(victim))
        outcomes = pool.score(items("a", "b", "c"))
        assert [outcome.rewards[0] for outcome in outcomes] == [1.0, 1.0, 1.0]
        assert victim not in pool.process_ids


def test_a_sample_is_scored_again_if_its_worker_is_stopped_or_killed(user_module: Write, tmp_path: Path) -> None:
    """Only once: a response that kills every worker costs its sample."""
    user_module(
        "killed",
        f"{IMPORTS}tries = Path({str(tmp_path / 'tries')!r})\n"
        "def f(prompt, response, answer):\n"
        "    tries.open('a').write(response)\n"
        "    if response == 'always' or response == 'once' and tries.read_text().count('once') == 1:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return RewardResult(1.0, True)\n",
    )
    config = RewardConfig(functions=(RewardFunction(name="killed:f"),), workers=1, timeout_s=1.0)
    with closing(RewardPool(config)) as pool:
        pool.start()
        os.kill(pool.process_ids[0], signal.SIGSTOP)
        outcomes = pool.score(items("first", "once", "always", "last"))
    assert [outcome.rewards for outcome in outcomes] == [(1.0,), (1.0,), (0.0,), (1.0,)]
    assert outcomes[2].metadata == {"reason": "crash", "function": "killed:f"}
    tries = (tmp_path / "tries").read_text()
    assert [tries.count(text) for text in ("first", "once", "always", "last")] == [1, 2, 2, 1]


@pytest.mark.parametrize("sent", ["SIGKILL", "SIGSTOP"])
def test_a_worker_that_is_killed_or_stopped_while_starting_is_started_again_within_a_bound(
    user_module: Write, tmp_path: Path, rejects: Rejects, monkeypatch: pytest.MonkeyPatch, sent: str
) -> None:
    monkeypatch.setattr(pools, "_LOOK_S", 0.5)
    user_module(
        "dies",
        f"{IMPORTS}starts = Path({str(tmp_path / 'starts')!r})\nstarts.open('a').write('x')\n"
        "if starts.stat().st_size < 3 or Path(starts.with_name('always')).exists():\n"
        f"    os.kill(os.getpid(), signal.{sent})\n"
        "def f(prompt, response, answer): return RewardResult(1.0, True)\n",
    )
    config = RewardConfig(functions=(RewardFunction(name="dies:f"),), start_timeout_s=60.0)
    with closing(RewardPool(config)) as pool:
        assert pool.score(items("a"))[0].rewards == (1.0,)
    (tmp_path / "always").touch()
    with closing(RewardPool(config)) as pool, rejects(RewardError, "worker-not-started"):
        pool.score(items("a"))
    assert (tmp_path / "starts").stat().st_size == 3 + 3


def test_close_ends_all_workers_even_if_one_hangs(rejects: Rejects) -> None:
    pool = RewardPool(user_config(workers=2))
    pool.start()
    pids = pool.process_ids
    os.kill(pids[0], signal.SIGSTOP)
    pool.close()
    assert not any(is_alive(pid) for pid in pids)
    pool.close()
    with rejects(RewardError, "pool-closed"):
        pool.score(items("a"))


ORPHAN = """
import sys, threading, time
from slime_like.config import RewardConfig, RunConfig
from slime_like.config.rollout import RewardFunction
from slime_like.sandbox.rewards.pool import RewardItem, RewardPool
pool = RewardPool(RewardConfig(functions=(RewardFunction(name="user_rewards:act"),), workers=2, timeout_s=1000))
pool.start()
print(*pool.process_ids, flush=True)
pool.score([RewardItem("", "spin", ""), RewardItem("", "hang", "")])
"""


def test_workers_die_with_their_parent_even_in_the_middle_of_a_sample() -> None:
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(is_alive(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait(30)
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


# ------------------------------------------------------------------------------------------------------------- services
def service_pool(**options: object) -> RewardPool:
    return RewardPool(RewardConfig(functions=(RewardFunction(name="http", options=options),)))


def test_a_service_that_hangs_ends_the_run_before_it_was_asked_for_every_response(url: str) -> None:
    slow = [RewardItem(str(prompt), "slow", "a") for prompt in range(20)]
    with closing(service_pool(url=url, timeout_s=0.05)) as pool, pytest.raises(RewardError) as caught:
        pool.score(slow)
    found = caught.value.code, caught.value.remedy
    assert found == ("reward-function-fails", "check the service, or reward.functions")


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_new_worker_gets_no_pipe_of_an_old_one(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Two workers end before the loop has closed their pipes. Ray's actors use uvloop."""
    setup = {"functions": [], "memory_mb": 64, "timeout_s": 5.0}

    async def ready() -> WorkerProcess:
        worker = WorkerProcess("slime_like.sandbox.rewards.worker")
        await worker.open(setup)
        assert "ready" in await worker.receive(30.0)
        return worker

    async def replace() -> None:
        old = [await ready() for _ in range(2)]
        for worker in old:
            worker.disconnect()
            worker.end()
        new = [await ready() for _ in range(3)]
        for worker in new:
            worker.send({"prompt": "", "response": "", "answer": ""})
            assert await worker.receive(30.0) == {"samples": []}
            worker.disconnect()
        await asyncio.gather(*(asyncio.to_thread(worker.end, 5.0) for worker in new))

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(replace())
