"""Put known bugs of packed RL training into the algorithm layer, one at a time: the named tests must fail.

Bugs of rollouts of several rows, on their way to training, are covered too. The tests run in one fork, with the changed
code of each bug in turn. Not covered: bugs of the parallel layer, of engines and of the rest of the orchestration.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import clean_forks
from tests.support.planted import Edit, plant, read_bugs

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240
BUGS = read_bugs(Path(__file__).with_name("algorithm_bugs.txt"))
TARGETS = sorted({target for _, targets in BUGS for target in targets})


@pytest.fixture(scope="module")
def codes() -> dict[str, int]:
    """Return pytest's exit codes: without a bug, and by the name of each."""
    # Forks of a clean server are quick, and free of threads that earlier tests left in this process.
    forks = clean_forks()
    results = forks.SimpleQueue()
    process = forks.Process(target=_run, args=(results,))
    process.start()
    process.join(TIMEOUT_S)
    process.kill()
    found = {}
    while not results.empty():
        name, code = results.get()
        found[name] = code
    return found


@pytest.mark.parametrize("name", [bug.name for bug, _ in BUGS if isinstance(bug, Edit)])
def test_a_bug_is_caught(name: str, codes: dict[str, int]) -> None:
    assert codes[name] == pytest.ExitCode.TESTS_FAILED


def test_the_tests_pass_without_a_bug(codes: dict[str, int]) -> None:
    """Otherwise a broken fork would look like a caught bug."""
    assert codes[""] == codes["again"] == pytest.ExitCode.OK


def _run(results: Any) -> None:
    """Run the named tests quietly."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    results.put(("", _exit_code(TARGETS)))
    for bug, targets in BUGS:
        if isinstance(bug, Edit):
            with plant(bug):
                results.put((bug.name, _exit_code(targets)))
    results.put(("again", _exit_code(TARGETS[:1])))


def _exit_code(targets: list[str]) -> int:
    # The plugin for unraisable exceptions would search all imported objects for garbage, which takes most of the time.
    plugins = ["-p", "no:cacheprovider", "-p", "no:unraisableexception"]
    arguments = ["-x", "-q", *plugins, "--rootdir", str(ROOT), "--hypothesis-profile", "mutation"]
    return int(pytest.main([*arguments, *(str(ROOT / "tests/unit" / target) for target in targets)]))
