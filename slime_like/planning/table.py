"""A plan on the terminal."""

import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table

from slime_like.config import RunConfig
from slime_like.config.gpus import GPUS
from slime_like.planning.hardware import GIB
from slime_like.planning.memory import PhaseMemory
from slime_like.planning.planned_run import Workload
from slime_like.planning.result import Plan
from slime_like.planning.search import Candidate
from slime_like.planning.step_time import SYNC_GB_PER_S, StepTime

_WIDTH = 120


def print_plan(config: RunConfig, plan: Plan, stream: TextIO | None = None) -> None:
    """Print the plan, the verdict last."""
    console = _console(stream or sys.stdout)
    gpu = plan.hardware.gpu
    console.print(
        f"{config.model.path.name} on {plan.nodes} nodes of {plan.hardware.gpus_per_node} {config.cluster.gpu} "
        f"({gpu.memory_gib:g} GiB), {plan.gpus_in_use} GPUs in use, engines {config.cluster.placement}"
    )
    for table in (_ranks(config, plan), _memory(plan), _traffic(plan), _time(plan)):
        if table is not None:
            console.print(table)
    for line in (*_lines(config, plan), _verdict(plan)):
        console.print(line, markup=False)


def print_candidates(found: Sequence[Candidate], host: bool, stream: TextIO | None = None) -> None:
    """Layouts, fastest first.

    Args:
        host: the size of a node's memory is given, and layouts that need more are left out.
    """
    console = _console(stream or sys.stdout)
    if not found:
        console.print("no layout of these GPUs fits")
        return
    looked_at = "" if host else "; host memory is not checked (give --cluster.host_memory_gib)"
    names = ("tensor", "pipeline", "context", "data", "expert")
    columns = (*names, "recompute", "score + train s", "utilisation", "least memory left", "where")
    table = _table(f"Layouts that fit, fastest first{looked_at}", columns, left=("recompute", "where"))
    for layout in found:
        sizes = [str(getattr(layout.parallel, name)) for name in names]
        left, where = f"{layout.tightest.margin / GIB:.1f} GiB", f"{layout.tightest.gpus}, {layout.tightest.phase}"
        table.add_row(*sizes, layout.recompute, f"{layout.seconds:.1f}", f"{layout.step.utilisation:.0%}", left, where)
    console.print(table)
    console.print(f"the first: {found[0].flags}", markup=False)


def _console(stream: TextIO) -> Console:
    return Console(file=stream, width=None if stream.isatty() else _WIDTH, highlight=False, soft_wrap=False)


def _table(title: str, columns: Sequence[str], left: Sequence[str]) -> Table:
    """An empty table, its columns but ``left`` justified to the right."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=column in ("kind", ""))
    return table


def _ranks(config: RunConfig, plan: Plan) -> Table:
    columns = ("ranks", "parameters", "TFLOP", "worst micro-batch", "kept per micro-batch", "in flight")
    title = f"Ranks, per GPU; recompute: {config.trainer.recompute}"
    table = _table(title, ("kind", *columns, "true of"), left=("kind", "true of"))
    for kind in (*plan.kinds, *plan.references):
        estimate, memory = kind.estimate, kind.estimate.memory
        trained = kind in plan.kinds  # nothing is kept for a reference's backward pass
        work = estimate.training if trained else estimate.forward
        table.add_row(
            kind.kind.name,
            str(len(kind.kind.ranks)),
            f"{memory.parameters:,}",
            f"{work.flops / 1e12:.1f}",
            f"{estimate.micro_batch_tokens:,} tokens",
            f"{memory.saved_bytes / GIB:.2f} GiB" if trained else "",
            str(memory.in_flight) if trained else "",
            estimate.layers,
        )
    return table


def _memory(plan: Plan) -> Table:
    """One column per phase of each kind of GPU, one row per item; phases of alike kinds are many, so the tightest kind
    of each phase is shown."""
    shown = _tightest_of_each_phase(plan.phases)
    names = list(dict.fromkeys(item.name for phase in shown for item in phase.items))
    columns = [f"{phase.phase}\n{phase.gpus}" for phase in shown]
    table = _table("Memory of the GPU with least left, GiB", ["", *columns], left=[""])
    for name in names:
        sizes = [next((item.nbytes for item in phase.items if item.name == name), None) for phase in shown]
        table.add_row(name, *("" if size is None else f"{size / GIB:.2f}" for size in sizes))
    table.add_section()
    for name, figure in (("sum", "total"), ("GPU", "capacity"), ("left", "margin")):
        table.add_row(name, *(f"{getattr(phase, figure) / GIB:.2f}" for phase in shown))
    return table


def _tightest_of_each_phase(phases: Sequence[PhaseMemory]) -> list[PhaseMemory]:
    found: dict[tuple[bool, str], PhaseMemory] = {}
    for phase in phases:
        key = (phase.gpus == "engines", phase.phase)
        if key not in found or phase.margin < found[key].margin:
            found[key] = phase
    return list(found.values())


def _traffic(plan: Plan) -> Table | None:
    most: dict[tuple[str, str], tuple[float, float, str]] = {}
    for rank in plan.kinds:
        for sent in rank.traffic:
            key = (sent.axis, sent.link)
            if sent.nbytes > most.get(key, (0.0, 0.0, ""))[0]:
                most[key] = sent.nbytes, sent.calls, rank.kind.name
    if not most:
        return None
    columns = ("axis", "link", "GB", "messages", "most by")
    table = _table("Sent by one rank in a step's training", columns, left=("axis", "link", "most by"))
    for (axis, link), (nbytes, calls, kind) in most.items():
        table.add_row(axis, link, f"{nbytes / 1e9:.1f}", f"{calls:,.0f}", kind)
    return table


def _time(plan: Plan) -> Table | None:
    step = plan.step
    if step is None:
        return None
    table = _table("Predicted step", ("phase", "seconds"), left=["phase"])
    for phase in ("generation", "references", "scoring", "training", "sync", "moving"):
        if seconds := getattr(step, phase):
            table.add_row({"references": "reference workers, beside generation"}.get(phase, phase), f"{seconds:.1f}")
    table.add_section()
    table.add_row("whole step", f"{step.total:.1f}")
    return table


def _lines(config: RunConfig, plan: Plan) -> Iterator[str]:
    engine, references, host = plan.engine, plan.references, plan.host
    if engine is not None:
        yield (
            f"engines: {config.rollout.num_engines} of {engine.gpus} GPUs; KV cache of one: {engine.kv_tokens:,} "
            f"tokens ({engine.kv_bytes_per_token / 1024:.0f} KiB each per GPU), {engine.longest_sequences:,} sequences "
            f"of {config.max_model_len:,}; decoding {engine.at_once:,} at once"
        )
    if references:
        size = config.reference.parallel.world_size
        yield f"reference workers: {config.reference_workers} of {size} GPUs, which score while others are sampled"
    if host is not None and host.items:
        parts = ", ".join(f"{item.name} {item.nbytes / GIB:.1f}" for item in host.items)
        room = "" if host.capacity is None else f" of cluster.host_memory_gib={host.capacity / GIB:g}"
        total = f"{host.total / GIB:.1f}{room} in all, beside the processes themselves"
        yield f"host memory of a node, GiB: {parts}; {total}"
    if plan.workload is not None and plan.step is not None:
        yield from _assumptions(config, plan, plan.workload, plan.step)
    yield from (f"note: {note}" for note in plan.notes)
    yield from (f"problem: {problem}" for problem in plan.problems)


def _assumptions(config: RunConfig, plan: Plan, workload: Workload, step: StepTime) -> Iterator[str]:
    share, sheet = plan.hardware.efficiency, GPUS[config.cluster.gpu]
    yield (
        f"a step: {workload.samples:,} sequences of {workload.mean_prompt:g} + {workload.mean_response:g} tokens, "
        f"{workload.micro_batches} micro-batches per replica and update; {step.model_flops:.3g} FLOP, "
        f"{step.utilisation:.0%} of the trainers' {sheet.tflops:g} TFLOP/s while they train"
    )
    yield (
        f"assumed, not measured: {share.matmul:.0%} of that rate in matrix products, {share.attention:.0%} in "
        f"attention, {share.memory:.0%} of memory bandwidth, {share.link:.0%} of links "
        f"(NVLink {plan.hardware.gpu.nvlink_gb_per_s:g}, network {plan.hardware.network_gb_per_s:g} GB/s per GPU)"
    )
    if plan.transport is not None:
        yield f"weights travel by {plan.transport}, at {SYNC_GB_PER_S[plan.transport]:g} GB/s (assumed)"


def _verdict(plan: Plan) -> str:
    tightest = plan.tightest
    seconds = f"planned in {plan.seconds:.1f} s"
    if tightest is None:
        return f"verdict: refused, {len(plan.problems)} problems; {seconds}"
    where = f"{tightest.gpus}, {tightest.phase}"
    if plan.problems:
        count = f"{len(plan.problems)} problem{'s' if len(plan.problems) > 1 else ''}"
        memory = "GPU memory suffices" if plan.fits else f"GPU memory does not suffice ({where})"
        return f"verdict: does not fit: {count}, {memory}; {seconds}"
    left = f"{tightest.margin / GIB:.1f} GiB left where least is ({where})"
    return f"verdict: fits, {left}; {_host_verdict(plan)}; {seconds}"


def _host_verdict(plan: Plan) -> str:
    if plan.host is None or plan.host.capacity is None:
        return "that is GPU memory, host memory is not checked (give --cluster.host_memory_gib)"
    return f"{(plan.host.capacity - plan.host.total) / GIB:.1f} GiB of a node's host memory are left for its processes"
