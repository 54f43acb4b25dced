"""Run one function on many ranks, forked from a server that has imported everything.

The test's failure shows the traceback of a failed rank. Ranks that are still running then, or after the time limit,
are killed by process id, and the failure shows the stacks of their threads.
"""

import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_like.interfaces import RankPlacement
from tests.support.forks import PRELOADED, clean_forks

RankFunction = Callable[..., Any]


def run_ranks(
    function: RankFunction, world_size: int, directory: Path, *arguments: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Run ``function(placement, *arguments)`` on every rank and return the results in rank order.

    ``function`` must be a module-level function (or a ``functools.partial`` of one). Arguments and results are passed
    in files below ``directory`` and may hold tensors. Fails the test when a rank fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    torch.save((function, arguments), directory / "task.pt")
    context = clean_forks()
    with held_ports(1) as (port,):
        processes = [
            context.Process(target=_rank_main, args=(rank, world_size, port, directory), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            _wait(processes, time.monotonic() + timeout_s)
        finally:
            codes = [process.exitcode for process in processes]
            _end(processes)
    _report_failures(directory, codes, timeout_s)
    return [torch.load(_file(directory, rank, "pt"), weights_only=False) for rank in range(world_size)]


def run_each(
    function: RankFunction, world_size: int, directory: Path, tasks: list[tuple[Any, ...]], timeout_s: float = 240.0
) -> list[tuple[Any, ...]]:
    """Run ``function(placement, *task)`` for each task in turn in the same processes, each with its own rendezvous.

    Return every task's results in rank order.
    """
    with held_ports(len(tasks)) as ports:
        results = run_ranks(_each, world_size, directory, function, ports, tasks, timeout_s=timeout_s)
    return list(zip(*results, strict=True))


def _each(placement: RankPlacement, function: RankFunction, ports: list[int], tasks: list[tuple[Any, ...]]) -> Any:
    found = []
    for number, (port, task) in enumerate(zip(ports, tasks, strict=True)):
        try:
            found.append(function(replace(placement, master_port=port), *task))
        except Exception as error:
            error.add_note(f"in task {number}: {task[0]}")
            raise
    return found


def run_by_size(function: RankFunction, directory: Path, tasks: dict[Any, tuple[Any, ...]]) -> dict[Any, list[Any]]:
    """Run each task on as many ranks as its configuration, its first argument, asks for; one fork per size.

    Return every task's results in rank order, by the tasks' names.
    """
    sizes: dict[int, list[Any]] = {}
    for name, (config, *_) in tasks.items():
        sizes.setdefault(config.trainer.parallel.world_size, []).append(name)
    found = {}
    for size, names in sizes.items():
        given, limit = [tasks[name] for name in names], 60.0 * (1 + len(names))
        results = run_each(function, size, directory / f"{size}-ranks", given, limit)
        found |= {name: list(ranks) for name, ranks in zip(names, results, strict=True)}
    return found


def selected(request: pytest.FixtureRequest, test: str) -> list[tuple[Any, ...]]:
    """Return the parameters of every case of the module's ``test`` that this run includes."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    return [tuple(item.callspec.params.values()) for item in items if item.originalname == test]


def _wait(processes: list[Any], deadline: float) -> None:
    """Wait until all ranks have ended, one has failed, or time is up."""
    while time.monotonic() < deadline and any(process.is_alive() for process in processes):
        if any(process.exitcode not in (None, 0) for process in processes):
            # The other ranks' collectives fail too; give them a moment to write their own tracebacks.
            deadline = min(deadline, time.monotonic() + 3.0)
        time.sleep(0.01)


def _end(processes: list[Any]) -> None:
    """Let ranks that are still running write their stacks (:func:`_rank_main`), then kill them."""
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        os.kill(process.pid, signal.SIGUSR1)
    if alive:
        time.sleep(0.5)
    for process in processes:
        process.kill()
        process.join(10)


def _report_failures(directory: Path, codes: list[int | None], timeout_s: float) -> None:
    errors = [file for rank in range(len(codes)) if (file := _file(directory, rank, "error")).exists()]
    if errors:
        errors.sort(key=lambda file: file.stat().st_mtime_ns)  # the first failure causes the others
        texts = [file.read_text() for file in errors]
        pytest.fail("\n".join([f"exit codes of the ranks: {codes}", *texts]), pytrace=False)
    missing = [rank for rank in range(len(codes)) if not _file(directory, rank, "pt").exists()]
    if missing:
        stacks = [f"---- rank {rank}\n{_file(directory, rank, 'stacks').read_text()}" for rank in missing]
        message = f"ranks {missing} (exit codes {codes}) gave no result within {timeout_s:.0f} s, in {directory}"
        pytest.fail("\n".join([message, *stacks]), pytrace=False)


def _rank_main(rank: int, world_size: int, port: int, directory: Path) -> None:
    stacks = _file(directory, rank, "stacks").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    placement = RankPlacement(rank, world_size, rank, "127.0.0.1", port)
    try:
        _require_preloaded()
        function, arguments = torch.load(directory / "task.pt", weights_only=False)
        result = function(placement, *arguments)
    except BaseException:
        _file(directory, rank, "error").write_text(f"---- rank {rank} of {world_size}\n{traceback.format_exc()}")
        raise SystemExit(1) from None
    torch.save(result, unfinished := _file(directory, rank, "unfinished"))
    unfinished.rename(_file(directory, rank, "pt"))


def _require_preloaded() -> None:
    if missing := [name for name in PRELOADED if name not in sys.modules]:
        raise RuntimeError(
            f"{', '.join(missing)} not preloaded, so this rank would spend seconds importing: importing failed in the "
            "fork server, or another server forks; start every fork with clean_forks of tests/support/forks.py"
        )


def _file(directory: Path, rank: int, suffix: str) -> Path:
    return directory / f"rank{rank}.{suffix}"


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Yield loopback ports that the kernel gives to no other process, but on which ranks may listen.

    A port that was free a moment ago may be taken when rank 0 binds it, because tests that run at the same time listen
    on hundreds of ports that the kernel chose. Linux lets two sockets share a port while only one of them listens and
    both set ``SO_REUSEADDR``, as every rendezvous does.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
        yield [int(held.getsockname()[1]) for held in sockets]


def free_port() -> int:
    """Return a port that is free now."""
    with held_ports(1) as (port,):
        return port
