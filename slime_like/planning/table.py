"""A plan on the terminal: the verdict first, then tables. Nothing needs more than 80 columns."""

import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich import box
from rich.table import Table

from slime_like.config import RunConfig
from slime_like.config.gpus import GPUS
from slime_like.planning import verdict
from slime_like.planning.memory import ENGINES, PhaseMemory
from slime_like.planning.result import Plan
from slime_like.planning.search import Candidate
from slime_like.planning.step_time import ATTENTION, HEAD, PRODUCTS, SYNC_GB_PER_S
from slime_like.planning.units import count_text, memory_text, seconds_text
from slime_like.system.console import Console

_WIDTH = 80
_MOST_PHASES = 4
_LEAST_SHOWN = 0.005
_LOST = {name: f"{name} below the ceiling" for name in (PRODUCTS, ATTENTION, HEAD)}


def print_plan(config: RunConfig, plan: Plan, stream: TextIO | None = None) -> None:
    """Print the plan, the verdict first."""
    console = _console(stream or sys.stdout)
    for line in (verdict.verdict(plan), verdict.host_verdict(plan), _subject(config, plan)):
        if line:
            console.print(line, markup=False)
    for problem in plan.problems:
        console.print(f"problem: {problem}", markup=False)
    if not plan.size_problems:
        console.print()
        for line in (*verdict.step_lines(plan), *verdict.waves(config, plan)):
            console.print(line, markup=False)
    for table in (_memory(plan), _time(plan), _lost(plan)):
        if table is not None:
            _print_table(console, table)
    console.print()
    for line in (*_workings(config, plan), *(f"note: {note}" for note in plan.notes)):
        console.print(line, markup=False)
    console.print(f"planned in {seconds_text(plan.seconds)}")


def print_candidates(found: Sequence[Candidate], host: bool, stream: TextIO | None = None) -> None:
    """Layouts, fastest first.

    Args:
        host: the size of a node's memory is given, and layouts that need more are left out.
    """
    console = _console(stream or sys.stdout)
    if not found:
        console.print("no layout of these GPUs fits")
        return
    if not host:
        console.print("warning: host memory was NOT checked: give --cluster.host_memory_gib")
    title = "Layouts that fit, fastest first: tensor (t), pipeline (p), context (c), data (d), expert (e)"
    columns = ("t", "p", "c", "d", "e", "tokens", "recompute", "engines", "step", "trainer", "ceiling", "free")
    table = _table(title, columns, left=())
    for layout in found:
        sizes = [str(getattr(layout.parallel, name)) for name in ("tensor", "pipeline", "context", "data", "expert")]
        times = seconds_text(layout.step.total), seconds_text(layout.seconds)
        left = f"{layout.step.utilisation:.0%}", memory_text(layout.tightest.margin)
        table.add_row(*sizes, f"{layout.tokens:,}", str(layout.recompute), layout.engines, *times, *left)
    _print_table(console, table)
    console.print()
    console.print(f"the first: {found[0].flags}", markup=False, soft_wrap=True)


def _console(stream: TextIO) -> Console:
    width = min(_WIDTH, Console(file=stream).width) if stream.isatty() else _WIDTH
    return Console(file=stream, width=width, highlight=False)


def _print_table(console: Console, table: Table) -> None:
    """A blank line, the title over the whole width, and the table."""
    title, table.title = str(table.title), None
    console.print(f"\n[bold]{title}[/bold]")
    console.print(table)


def _table(title: str, columns: Sequence[str], left: Sequence[str]) -> Table:
    """An empty table, its columns but ``left`` justified to the right."""
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table


def _subject(config: RunConfig, plan: Plan) -> str:
    hardware = plan.hardware
    nodes, gpus = count_text(plan.nodes, "node"), count_text(hardware.gpus_per_node, "GPU")
    chosen = " (the number needed: cluster.nodes is not set)" if config.cluster.nodes is None else ""
    shared = (
        "trainers and engines share them" if config.cluster.placement == "colocated" else "engines on separate GPUs"
    )
    placement = "" if config.supervised else f", {shared}"
    return (
        f"{config.model.path.name} on {nodes} of {gpus}{chosen}, {config.cluster.gpu} with "
        f"{memory_text(hardware.memory_bytes)}; {count_text(plan.gpus_in_use, 'GPU')} needed{placement}."
    )


def _memory(plan: Plan) -> Table:
    """One column per phase, one row per item; of alike kinds of ranks, the one with least left in that phase. If there
    are more phases than columns, those with most left are not shown."""
    shown = _tightest_of_each_phase(plan.phases)
    names = list(dict.fromkeys(item.name for phase in shown for item in phase.items if item.nbytes))
    columns = [_head(phase) for phase in shown]
    table = _table("GPU memory, by phase, of the GPU with least free", ["", *columns], left=[""])
    for name in names:
        sizes = [next((item.nbytes for item in phase.items if item.name == name), 0) for phase in shown]
        table.add_row(name, *(memory_text(size) if size else "" for size in sizes))
    table.add_section()
    for name, field in (("sum", "total"), ("GPU", "capacity"), ("free", "margin")):
        table.add_row(name, *(memory_text(getattr(phase, field)) for phase in shown))
    return table


def _head(phase: PhaseMemory) -> str:
    return "\n".join(part for part in (phase.phase, phase.kind) if part)


def _tightest_of_each_phase(phases: Sequence[PhaseMemory]) -> list[PhaseMemory]:
    found: dict[tuple[bool, str], PhaseMemory] = {}
    for phase in phases:
        key = (phase.gpus == ENGINES, phase.phase)
        if key not in found or phase.margin < found[key].margin:
            found[key] = phase
    tightest = sorted(found.values(), key=lambda phase: phase.margin)[:_MOST_PHASES]
    return [phase for phase in found.values() if phase in tightest]


def _time(plan: Plan) -> Table | None:
    step = plan.step
    if step is None:
        return None
    table = _table("Predicted time of a step", ("phase", "time", "share"), left=["phase"])
    for phase, name in verdict.PHASES.items():
        if seconds := getattr(step, phase):
            table.add_row(name, seconds_text(seconds), f"{seconds / step.total:.0%}")
    table.add_section()
    table.add_row("whole step" + (", phases overlap" if step.overlapped else ""), seconds_text(step.total), "")
    return table


def _lost(plan: Plan) -> Table | None:
    """Where the seconds of training go; what takes less than half a percent is not shown."""
    step = plan.step
    if step is None or not step.training:
        return None
    gpu = plan.hardware.gpu
    known = "measured" if gpu.measured_tflops else f"assumed from the data sheet's {gpu.tflops:g}, not measured"
    title = f"Training: share of {gpu.ceiling_tflops:.0f} TFLOP/s per GPU ({known}), and what takes the rest"
    table = _table(title, ("", "share"), left=("",))
    table.add_row("the model's products and attention, at the ceiling", f"{step.utilisation:.0%}")
    table.add_section()
    for name, seconds in sorted(step.lost.items(), key=lambda item: -item[1]):
        if abs(share := seconds / step.training) >= _LEAST_SHOWN:
            table.add_row(_LOST.get(name, name), f"{share:.1%}")
    return table


def _workings(config: RunConfig, plan: Plan) -> Iterator[str]:
    """What the figures follow from."""
    engine, work, step = plan.engine, plan.workload, plan.step
    if engine is not None:
        yield (
            f"engines: {count_text(config.rollout.num_engines, 'engine')} of {count_text(engine.gpus, 'GPU')}; KV "
            f"cache of one: {engine.kv_tokens:,} tokens of {memory_text(engine.kv_bytes_per_token)} per GPU, "
            f"{count_text(engine.longest_sequences, 'sequence')} of {config.max_model_len:,} tokens"
        )
    if plan.references:
        size = count_text(config.reference.parallel.world_size, "GPU")
        yield f"references: {count_text(config.reference_workers, 'worker')} of {size}, scoring beside generation"
    if work is not None and step is not None:
        tokens = f"{work.mean_prompt:,g} + {work.mean_response:,g} tokens"
        batches = count_text(work.micro_batches, "micro-batch", "micro-batches")
        yield (
            f"step: {work.samples:,} sequences of {tokens}, {batches} per replica and update; "
            f"{step.model_flops:.3g} FLOP"
        )
        if config.rollout.agent.is_set and not config.supervised:
            yield "one call of each agent; give --mean_prompt and --mean_response for rows of several"
        yield from _assumptions(config, plan)
    layers = {kind.estimate.layers for kind in plan.kinds}
    yield f"planned layers: {', '.join(sorted(layers))}; Transformer Engine's keep less; recompute: {plan.recompute}"


def _assumptions(config: RunConfig, plan: Plan) -> Iterator[str]:
    share, sheet = plan.hardware.efficiency, GPUS[config.cluster.gpu]
    nvlink = f"NVLink {plan.hardware.gpu.nvlink_gb_per_s:g}, " if plan.hardware.gpus_per_node > 1 else ""
    rate = "" if plan.transport is None else f"{SYNC_GB_PER_S[plan.transport]:g} GB/s"
    sync = f", weight sync by {plan.transport} at {rate}" if rate else ""
    yield (
        f"assumed, not measured: {share.matmul:.0%} of {sheet.ceiling_tflops:.0f} TFLOP/s in matrix products, "
        f"{share.attention:.0%} in attention, {share.memory:.0%} of {sheet.memory_gb_per_s:,g} GB/s memory bandwidth, "
        f"{share.link:.0%} of links ({nvlink}network {plan.hardware.network_gb_per_s:g}, host "
        f"{plan.hardware.host_gb_per_s:g} GB/s per GPU){sync}"
    )
