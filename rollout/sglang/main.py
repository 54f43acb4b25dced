"""Entry point of SGLang's process: ``python -m rollout.sglang.main DESCRIPTOR SCRATCH``."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from rollout import stand_ins
from rollout.limits import on_cpu
from rollout.sglang.arguments import engine_arguments
from rollout.weight_update import AnswerQueue, StoreQueue
from slime_like.errors import EngineError
from slime_like.hosting.process import Owner

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine


def main(descriptor: int, scratch: Path) -> None:
    """Serve the owner at the other end of the inherited socket ``descriptor``, with temporary files in ``scratch``."""
    owner = Owner(Connection(descriptor), scratch)
    with owner.starting() as (config, engine_index, part):
        tempfile.tempdir = str(scratch)
        answers: AnswerQueue = multiprocessing.get_context(_start_method()).SimpleQueue()
        if part.spans:
            answers = StoreQueue(part.host, part.port)
        arguments = functools.partial(engine_arguments, config, engine_index, part=part)
        engine = _launch(arguments, answers, descriptor, owner)
        tempfile.tempdir = None
        from rollout.sglang.host import Host

        gc.freeze()
        host: Host | None = None
        if part.number == 0:  # schedulers on further nodes receive their calls from the first one's
            host = Host(engine, answers, config, engine_index)
            engine.loop.run_until_complete(host.ping())
            engine.loop.run_until_complete(host.receive("received"))
        if on_cpu():  # every socket is connected and every group has met, except maybe NCCL's on a GPU
            shutil.rmtree(scratch)
    engine.loop.run_until_complete(owner.serve(host))


class _SchedulerFailed(Exception):
    """Raised on the signal by which a scheduler reports its failure."""


def _launch(
    arguments: Callable[[Collection[str]], dict[str, Any]], answers: AnswerQueue, descriptor: int, owner: Owner
) -> Engine:
    """Start one engine, or its part on this node. Main thread only.

    This process ends with the engine. On a CPU, schedulers are forked, because importing SGLang again would take most
    of the start. CUDA does not allow that.

    Args:
        arguments: returns SGLang's arguments, given the names of all.
        answers: queue of its ranks' answers.
        descriptor: the owner's socket, which schedulers must not keep open.

    Raises:
        EngineError: an engine argument is rejected, or a scheduler failed (with its message).
    """
    stand_ins.install(stand_ins.SGLANG)
    if on_cpu():  # SGLang would import it for quantized models, and take a sixth longer to start
        sys.modules.setdefault("vllm", None)  # type: ignore[arg-type]
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.server_args import ServerArgs

    given = arguments({field.name for field in record_fields(ServerArgs)})
    owned_engine, schedulers = _engine_class(answers, descriptor, owner)
    try:
        engine = owned_engine(**given, custom_sigquit_handler=_raise_failure)
    except _SchedulerFailed as failure:
        _, problem, _ = (None, None, "") if answers.empty() else answers.get()
        raise EngineError(problem or "a scheduler failed; see its log", code="scheduler-failed") from failure

    def end(*_: Any) -> None:
        owner.end()

    handlers = SimpleNamespace(sigterm_handler=end, running_phase_sigquit_handler=end)
    if engine.tokenizer_manager is not None:
        engine.tokenizer_manager.signal_handler_class = lambda manager: handlers
    owner.end_with(schedulers)
    return engine


def _engine_class(answers: AnswerQueue, descriptor: int, owner: Owner) -> tuple[type[Engine], list[BaseProcess]]:
    """Return SGLang's engine class without a detokenizer, and the list that will hold its schedulers."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.load_snapshot import shm_path_for
    from sglang.srt.server_args import PortArgs, ServerArgs

    from rollout.sglang.scheduler import run_scheduler

    schedulers: list[BaseProcess] = []
    inherited = descriptor if _start_method() == "fork" else None

    class OwnedEngine(Engine):
        run_scheduler_process_func = staticmethod(functools.partial(run_scheduler, answers, inherited))

        @classmethod
        def _launch_scheduler_processes(
            cls, server_args: ServerArgs, port_args: PortArgs, *arguments: Any, **options: Any
        ) -> Any:
            owner.will_remove(Path(shm_path_for(port_args.instance_id)))
            multiprocessing.set_start_method(_start_method(), force=True)
            result, processes = super()._launch_scheduler_processes(server_args, port_args, *arguments, **options)
            schedulers.extend(processes)
            return result, processes

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_: Any) -> Any:
            return [], []

    return OwnedEngine, schedulers


def _start_method() -> str:
    return "fork" if on_cpu() else "spawn"


def _raise_failure(number: int, frame: FrameType | None) -> None:
    raise _SchedulerFailed


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
