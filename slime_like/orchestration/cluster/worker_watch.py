"""Watch over the run's workers on all nodes: stopped and hanging ones are reported, then ended."""

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import ray
from ray._private import state
from ray._private.worker import global_worker
from ray.exceptions import ActorHandleNotFoundError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime_like.orchestration.cluster.hangs import HangWatch, WorkerPulse, kill_family, worker_pulse
from slime_like.orchestration.cluster.stopped import Ending, Stopped, StopWatch, recently_ended, stopped_processes

LOOK_EVERY_S = 15.0


def look_at_workers(
    workers: Collection[int], node: str, stopped: Collection[Stopped], hanging: Collection[Stopped]
) -> tuple[list[Stopped], list[WorkerPulse]]:
    """Return the stopped processes and the pulses of these workers on this node. Kill ``stopped`` processes that are
    still stopped, and ``hanging`` workers with their children."""
    for worker in hanging:
        if worker.node == node:
            kill_family(worker)
    pulses = [pulse for worker in workers if (pulse := worker_pulse(worker, node))]
    return stopped_processes(workers, node, stopped), pulses


class WorkerWatch:
    """Thread that checks the workers of this process's job on all nodes every ``LOOK_EVERY_S`` seconds.

    Args:
        note: called with a sentence, from that thread.
        hang_timeout_s: see ``HangWatch``.
    """

    def __init__(self, note: Callable[[str], None], hang_timeout_s: float) -> None:
        self._note = note
        self._stops, self._hangs = StopWatch(), HangWatch(hang_timeout_s)
        self._over = threading.Event()
        self._asked: dict[str, Any] = {}  # answers that were not there in time, by node
        self._thread = threading.Thread(target=self._run, name="worker-watch", daemon=True)
        self._thread.start()

    def close(self, wait: bool, failure: str) -> Ending | None:
        """End the thread. Return the end, shortly before, of a worker that ``failure`` is about, if there is one.

        ``wait`` needs a Ray that can answer.
        """
        self._over.set()
        if wait:
            self._thread.join(LOOK_EVERY_S)
        endings = [*self._stops.ended.values(), *self._hangs.ended.values()]
        return recently_ended(endings, time.monotonic(), failure)

    def _run(self) -> None:
        failed = False
        end: tuple[list[Stopped], list[Stopped]] = [], []
        while not self._over.wait(LOOK_EVERY_S):
            try:
                end, failed = self._look(*end), False
            except Exception as error:  # Ray can raise any class, such as after losing a daemon or a node's answer
                if not failed and not self._over.is_set():
                    self._note(f"hangs could not be looked for ({type(error).__name__}: {error}); trying again")
                failed = True

    def _look(self, *end: Collection[Stopped]) -> tuple[list[Stopped], list[Stopped]]:
        """Look once, and kill ``end``. Return the stopped and the hanging processes that the next look kills."""
        job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
        actors = state.actors(None, job, "ALIVE")
        stopped, pulses = self._ask(actors.values(), *end)
        notes, stopped = self._stops.look(stopped, time.monotonic())
        more, hanging = self._hangs.look(pulses, time.monotonic())
        for note in (*notes, *more):
            self._note(note)
        places = {(worker.node, worker.process) for worker in hanging}
        for actor in actors.values():  # a process in state D does not die of its signal
            if (actor["Address"]["IPAddress"], actor["Pid"]) in places:
                with suppress(ActorHandleNotFoundError):  # an engine's actor on a further node, which that engine owns
                    global_worker.core_worker.kill_actor(ray.ActorID.from_hex(actor["ActorID"]), True)
        return stopped, hanging

    def _ask(self, actors: Collection[Any], *end: Collection[Stopped]) -> tuple[list[Stopped], list[WorkerPulse]]:
        here = ray.get_runtime_context().get_node_id()
        nodes: dict[str, tuple[str, list[int]]] = {}  # address and living actors' processes
        for actor in actors:
            place = actor["Address"]
            nodes.setdefault(place["NodeID"], (place["IPAddress"], []))[1].append(actor["Pid"])
        found = []
        for node, (address, workers) in nodes.items():
            if node == here:
                found.append(look_at_workers(workers, address, *end))
            elif node not in self._asked:
                strategy = NodeAffinitySchedulingStrategy(node, soft=False)
                options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": strategy}
                self._asked[node] = ray.remote(look_at_workers).options(**options).remote(workers, address, *end)
        asked = {reference: node for node, reference in self._asked.items()}
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=LOOK_EVERY_S) if asked else ([], [])
        for reference in ready:
            del self._asked[asked[reference]]
            found.append(ray.get(reference))
        return [one for stopped, _ in found for one in stopped], [one for _, pulses in found for one in pulses]
