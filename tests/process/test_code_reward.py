"""The reward for code, and custom rewards and environments that a worker tries before a run starts."""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from slime_like.checks.check import check
from slime_like.config import RewardConfig, RewardFunction
from slime_like.config.reading.load import load_config
from slime_like.errors import Problem
from slime_like.sandbox.rewards.code_tests import code_tests
from slime_like.sandbox.rewards.pool import RewardItem, RewardPool, start_problems
from tests.unit.checks.checkpoint import sound_flags


def _code(text: str) -> str:
    return f"Here it is.\n```python\n{text}\n```"


_ECHO = "import sys\nprint(sys.stdin.read().strip(), ' ')\nsys.exit()"
_THREAD = "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()\ndef f(x): return x * x"
_TESTS = "assert f(2) == 4\nassert f(-1) == 1"


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (_code("def f(x): return x * x"), _TESTS, True),
        (_code("f = lambda x: x ** 2"), json.dumps(_TESTS.splitlines()), True),
        (_code("def f(x): return 1") + _code("def f(x): return x * x"), _TESTS, True),
        ("```\nimport math\ndef f(x): return math.prod((x, x))\n```", _TESTS, True),
        (_code("print(2 * int(input()))"), '{"inputs": ["3", "4\\n"], "outputs": ["6\\n", "8"]}', True),
        (_code(_ECHO), '{"inputs": ["\u00e9"], "outputs": ["\u00e9"]}', True),
        (_code(_THREAD), _TESTS, True),
        ("```py\r\ndef f(x): return x * x\r\n```", _TESTS, True),
        (_code("def f(x):\n    print('noise')\n    return x * x"), _TESTS, True),
        (_code("class A:\n    def f(self, x): return x * x"), "assert A().f(3) == 9", True),
        (_code("for _ in range(2): print(input())"), '{"inputs": ["a\\nb"], "outputs": ["a \\nb\\n"]}', True),
        ("```sh\nls\n```\n" + _code("def f(x): return x * x") + "\nOutput:\n```\n4\n```", _TESTS, True),
        (_code("def f(x): return x * x") + "</think>" + _code("def f(x): return x"), _TESTS, False),
        (_code("def f(x): return x"), _TESTS, False),
        ("```json\n{}\n```", _TESTS, False),
        ("", _TESTS, False),
        (_code(""), _TESTS, False),
        (_code("def g(x): return x * x"), _TESTS, False),
        (_code("print('a')"), '{"inputs": ["", ""], "outputs": ["a", "b"]}', False),
        (_code("import no_such_module\ndef f(x): return x * x"), _TESTS, False),
        (_code("def f(x): return x * x") + _code("def f(x): return 1"), _TESTS, False),
        ("def f(x): return x * x", _TESTS, False),
        (_code("def f(x) return"), _TESTS, False),
        (_code("print(3 * int(input()))"), '{"inputs": ["3"], "outputs": ["6"]}', False),
        (_code("import sys\nprint(6)\nsys.exit(1)"), '{"inputs": ["3"], "outputs": ["6"]}', False),
        (_code("import sys; sys.exit(0)"), _TESTS, False),
        (_code("import os; os._exit(0)"), _TESTS, False),
        (_code("raise SystemExit"), _TESTS, False),
        (_code("x = [0] * 10**10\ndef f(x): return x * x"), _TESTS, False),
        (_code("def f(x): return f(x)"), _TESTS, False),
        (_code("print('x' * 10**7)\ndef f(x): return x * x"), _TESTS, False),
        (_code("import ctypes; ctypes.string_at(0)"), _TESTS, False),
    ],
)  # fmt: skip
def test_code(response: str, answer: str, right: bool) -> None:
    result = code_tests("", response, answer)
    assert (result.reward, result.success) == (float(right), right)


_FORBIDDEN = [
    "open('/etc/passwd').read()", "open(file).read()", "open(file, 'w')", "open(file + '2', 'w')", "os.listdir('/')",
    "os.unlink(file)", "os.rename(file, file + '2')", "os.chmod(file, 0o777)", "os.truncate(file, 0)",
    "os.symlink('/', file + '2')", "os.utime(file)", "os.mkdir(file + '2')", "socket.socket()",
    "socket.create_connection(('127.0.0.1', 9), 1)", "socket.socket(socket.AF_UNIX)", "os.fork()",
    "subprocess.run(['/bin/true'])", "os.execv('/bin/true', ['true'])", "os.kill(os.getppid(), 9)",
    "os.kill(os.getppid(), 19)", "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)", "os.setuid(65534)",
    "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))", "open('/proc/self/environ').read()",
    "open(f'/proc/{os.getppid()}/mem', 'rb')", "os.memfd_create('x')", "os.chdir('/etc') or open('passwd')",
    "os.sched_setaffinity(os.getppid(), [0])", "fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
    "fcntl.fcntl(0, fcntl.F_SETSIG, 9)", "fcntl.fcntl(0, 15, struct.pack('ii', 1, os.getppid()))",
    "fcntl.fcntl(0, fcntl.F_NOTIFY, 2)", "fcntl.fcntl(0, fcntl.F_SETLEASE, 0)", "fcntl.lockf(1, fcntl.LOCK_EX)",
    "fcntl.ioctl(0, 0x8901, struct.pack('i', os.getppid()))", "fcntl.ioctl(0, 0x5452, b'1234')",
    "signal.pidfd_send_signal(0, 9)", "signal.pthread_kill(threading.get_ident(), 9)",
]  # fmt: skip
_TRY_ALL = """
import fcntl, os, resource, signal, socket, struct, subprocess, threading
def others(acts, file):
    found = []
    for act in acts:
        try:
            eval(act)
        except PermissionError:
            continue
        except Exception as error:
            act += f" raised {error!r}"
        found.append(act)
    return found
"""


def test_the_kernel_refuses_forbidden_acts(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("confined") / "file"
    file.write_text("secret")
    file.chmod(0o640)
    before = (file.stat().st_mode, file.stat().st_mtime_ns)
    result = code_tests("", _code(_TRY_ALL), f"found = others({_FORBIDDEN}, {str(file)!r})\nassert not found, found")
    assert result.success, result.metadata
    assert [path.name for path in file.parent.iterdir()] == ["file"] and file.read_text() == "secret"
    assert (file.stat().st_mode, file.stat().st_mtime_ns) == before


_ATTACK = """
import fcntl, os, struct
def f():
    read, write = os.pipe()
    for act in (
        lambda: fcntl.fcntl(read, fcntl.F_SETSIG, 9),
        lambda: fcntl.fcntl(read, fcntl.F_SETOWN, {victim}),
        lambda: fcntl.fcntl(read, 15, struct.pack("ii", 1, {victim})),
        lambda: fcntl.ioctl(read, 0x8901, struct.pack("i", {victim})),
        lambda: fcntl.ioctl(read, 0x5452, struct.pack("i", 1)),
        lambda: fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK),
    ):
        try:
            act()
        except OSError:
            pass
    os.write(write, b"now")
    return os.read(read, 3)
"""


def test_the_kernel_signals_no_process_for_a_program() -> None:
    """A pipe whose owner is another process would send it a signal of the program's choice with each write."""
    with subprocess.Popen(["sleep", "60"]) as victim:
        result = code_tests("", _code(_ATTACK.format(victim=victim.pid)), "assert f() == b'now'")
        assert result.success, result.metadata
        with pytest.raises(subprocess.TimeoutExpired):
            victim.wait(0.5)
        victim.kill()


_ORDINARY = """
import array, concurrent.futures, fcntl, io, os, select, sys, tempfile, threading, time
import numpy, sympy
def f(x):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        squares = list(pool.map(lambda y: y * y, [x, x]))
    assert round(numpy.linalg.det(numpy.eye(2) * x)) == x * x and sympy.factorint(12) == {2: 2, 3: 1}
    read, write = os.pipe()
    os.set_blocking(read, False), os.set_inheritable(read, True), os.set_inheritable(read, False)
    poll = select.epoll()
    poll.register(read, select.EPOLLIN)
    os.write(os.dup(write), b"ab")
    waiting = array.array("i", [0])
    fcntl.ioctl(read, 0x541B, waiting)
    assert poll.poll(1) and waiting[0] == 2 and not os.isatty(read) and not sys.stdout.isatty()
    return squares[0]
"""


def test_libraries_threads_and_pipes_work_in_the_sandbox() -> None:
    result = code_tests("", _code(_ORDINARY), _TESTS, timeout_s=30.0, memory_mb=2048)
    assert result.success, result.metadata


def test_partial_rewards_and_the_time_limit_of_all_tests() -> None:
    answer = json.dumps(["assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 9"])
    one = code_tests("", _code("def f(x): return 4"), answer, partial=True)
    assert (one.reward, one.success) == (1 / 3, False) and one.metadata["passed"] == 1
    assert code_tests("", _code("def f(x): return x * x"), answer, partial=True).reward == 1.0
    slow = code_tests("", _code("while True: pass"), answer, partial=True, timeout_s=0.3)
    assert slow.reward == 0.0 and slow.metadata["reason"] == "timeout"


def test_workers_look_at_the_first_row_and_run_code() -> None:
    config = RewardConfig(functions=(RewardFunction(name="code"),))
    (problem,) = start_problems(config, 0, RewardItem("", "?", "no such thing ("))
    assert problem.startswith("reward.functions.0.name=code fails on the first row of the data")
    with closing(RewardPool(config)) as pool:
        (outcome,) = pool.score([RewardItem("", _code("def f(x): return 4"), "assert f(2) == 4")])
    assert (outcome.rewards, outcome.successes) == ((1.0,), (1.0,)), outcome.metadata


Problems = Callable[..., list[Problem]]


@pytest.fixture
def problems_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Problems:
    """Check a run with a module ``own_code``, which the command and the workers can find."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def problems(source: str, *flags: str) -> list[Problem]:
        (tmp_path / "own_code.py").write_text(source)
        found = check(load_config(None, [*sound_flags(tmp_path), *flags]))
        assert "own_code" not in sys.modules
        return found

    return problems


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(prompt, response, answer): return response == answer", []),
        ("def f(prompt, response, answer, row): return float(row['prompt'] in prompt)", []),
        ("def f(prompt, response, answer): ...\nraise SystemExit('I will not')", [""]),
        ("def f(prompt, response, answer): import os; os._exit(3)", [""]),
        ("def f(prompt, response, answer): return 'right'", [""]),
        ("import time\ntime.sleep(1000)\n", ["not ready within reward.start_timeout_s=0.5 s: it wrote nothing"]),
    ],
)
def test_a_reward_is_tried_within_a_bound(problems_of: Problems, source: str, found: list[str]) -> None:
    bound = ("--reward.start_timeout_s", "0.5" if "sleep" in source else "60")
    problems = problems_of(source, "--reward.functions", "[{name: 'own_code:f'}]", *bound)
    for problem, words in zip(map(str, problems), found, strict=True):
        assert problem.startswith("reward.functions.0.name=own_code:f") and words in problem


ENVIRONMENT = """
class Rounds:
    def __init__(self, rounds: int = 3):
        if rounds > 9:
            raise ValueError("at most 9")

    def reset(self, task):
        if task.fields.get("secret") == "none":
            raise LookupError(f"no secret for {task.prompt} and {task.answer}")
        return {"limit": {1, 2}} if task.fields.get("secret") == "set" else {"limit": 1}

    def step(self, state, response): ...
"""


@pytest.mark.parametrize(
    ("options", "secret", "words"),
    [
        ({"rounds": 9}, "7", []),
        ({"turns": 3}, "7", ["cannot be called with its options", "turns"]),
        ({"rounds": 10}, "7", ["at most 9"]),
        ({}, "none", ["cannot be reset for the first row", "no secret for 2+3 and 5"]),
        ({}, "set", ["first row", "JSON"]),
    ],
)
def test_an_environments_options_and_the_first_row_are_tried(
    problems_of: Problems, tmp_path: Path, options: dict[str, Any], secret: str, words: list[str]
) -> None:
    """A reset may raise, or return a state that is not expressible in JSON."""
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "2+3", "answer": "5", "environment": {"secret": secret}}) + "\n")
    flags = ["--data.train", str(data), "--data.environment_key", "environment"]
    flags += ["--rollout.environment.name", "own_code:Rounds", "--rollout.environment.template", "{observation}"]
    problems = problems_of(ENVIRONMENT, *flags, "--rollout.environment.options", json.dumps(options))
    assert [problem.code for problem in problems] == ["rollout.environment-custom"] * bool(words)
    assert all(word in str(problem) for problem in problems for word in ("own_code:Rounds", *words))
