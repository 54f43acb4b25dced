"""Text of a plan on the terminal, at most 80 columns wide: the verdict first, then tables."""

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
from slime_like.planning.step_time import SYNC_GB_PER_S, StepTime
from slime_like.planning.units import memory_text, seconds_text
from slime_like.system.console import Console
from slime_like.system.words import counted

_WIDTH = 80
_MOST_PHASES = 4
_LEAST_SHOWN = 0.005


def print_plan(config: RunConfig, plan: Plan, stream: TextIO | None = None) -> None:
    """Print the plan, the verdict first."""
    console = _console(stream or sys.stdout)
    lines = list(filter(None, (verdict.verdict(plan), verdict.host_verdict(plan), _subject(config, plan))))
    lines += [f"problem: {problem}" for problem in plan.problems]
    if plan.fits:
        lines += ["", *verdict.step_lines(config, plan)]
    _print_lines(console, lines)
    _print_table(console, _memory(plan))
    if plan.step is not None:
        _print_table(console, _time(plan.step))
        _print_table(console, _training(plan, plan.step))
    notes = [f"note: {note}" for note in plan.notes]
    _print_lines(console, ["", *_workings(config, plan), *notes, f"planned in {seconds_text(plan.seconds)}"])


def print_candidates(found: Sequence[Candidate], host: bool, stream: TextIO | None = None) -> None:
    """Print layouts, fastest first.

    Args:
        host: whether the size of a node's memory is given, so layouts that need more are left out.
    """
    console = _console(stream or sys.stdout)
    if not found:
        console.print("no layout of these GPUs fits")
        return
    if not host:
        console.print("warning: host memory was NOT checked: give --cluster.host_memory_gib")
    title = "Layouts that fit, fastest first: tensor (t), pipeline (p), context (c), data (d), expert (e)"
    table = _table(title, ("t", "p", "c", "d", "e", "tokens", "recompute", "step", "trainer", "ceiling", "free"))
    for layout in found:
        parallel, step = layout.trainer.parallel, layout.step
        sizes = (getattr(parallel, name) for name in ("tensor", "pipeline", "context", "data", "expert"))
        table.add_row(
            *map(str, sizes),
            f"{layout.trainer.target_tokens_per_batch:,}",
            str(layout.trainer.recompute),
            seconds_text(step.total),
            seconds_text(step.scoring + step.training),
            f"{step.utilization:.0%}",
            memory_text(layout.tightest.margin),
        )
    _print_table(console, table)
    console.print(f"\nthe first: {found[0].flags}", markup=False, soft_wrap=True)


def _console(stream: TextIO) -> Console:
    width = min(_WIDTH, Console(file=stream).width) if stream.isatty() else _WIDTH
    return Console(file=stream, width=width, highlight=False)


def _print_lines(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, markup=False)


def _print_table(console: Console, table: Table) -> None:
    """Print a blank line, the title over the whole width, and the table."""
    title, table.title = str(table.title), None
    console.print(f"\n[bold]{title}[/bold]")
    console.print(table)


def _table(title: str, columns: Sequence[str]) -> Table:
    """Return an empty table. Columns are justified to the right, except for one of names."""
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "phase") else "right")
    return table


def _subject(config: RunConfig, plan: Plan) -> str:
    hardware = plan.hardware
    nodes, gpus = counted(plan.nodes, "node"), counted(hardware.gpus_per_node, "GPU")
    chosen = " (the number needed: cluster.nodes is not set)" if config.cluster.nodes is None else ""
    shared = (
        "trainers and engines share them" if config.cluster.placement == "colocated" else "engines on separate GPUs"
    )
    placement = "" if config.supervised else f", {shared}"
    return (
        f"{config.model.path.name} on {nodes} of {gpus}{chosen}, {config.cluster.gpu} with "
        f"{memory_text(hardware.memory_bytes)}; {counted(plan.gpus_in_use, 'GPU')} needed{placement}."
    )


def _memory(plan: Plan) -> Table:
    """Return a column per phase and a row per item, of the kind of ranks with the least free memory in that phase. Of
    too many phases, those with the most free memory are left out."""
    found: dict[tuple[bool, str], PhaseMemory] = {}
    for phase in plan.phases:
        key = (phase.gpus == ENGINES, phase.phase)
        if key not in found or phase.margin < found[key].margin:
            found[key] = phase
    tightest = sorted(found.values(), key=lambda phase: phase.margin)[:_MOST_PHASES]
    shown = [phase for phase in found.values() if phase in tightest]
    heads = ["\n".join(filter(None, (phase.phase, phase.kind))) for phase in shown]
    table = _table("Memory per phase, on the GPU with the least free memory", ["", *heads])
    for name in dict.fromkeys(name for phase in shown for name, nbytes in phase.items.items() if nbytes):
        sizes = [phase.items.get(name, 0) for phase in shown]
        table.add_row(name, *(memory_text(size) if size else "" for size in sizes))
    table.add_section()
    for name, field in (("sum", "total"), ("GPU", "capacity"), ("free", "margin")):
        table.add_row(name, *(memory_text(getattr(phase, field)) for phase in shown))
    return table


def _time(step: StepTime) -> Table:
    table = _table("Predicted time of a step", ("phase", "time", "share"))
    for phase, name in verdict.PHASES.items():
        if seconds := getattr(step, phase):
            table.add_row(name, seconds_text(seconds), f"{seconds / step.total:.0%}")
    table.add_section()
    table.add_row("whole step" + (", phases overlap" if step.overlapped else ""), seconds_text(step.total), "")
    return table


def _training(plan: Plan, step: StepTime) -> Table:
    """Return causes of training's seconds that take at least half a percent."""
    gpu = plan.hardware.gpu
    known = "measured" if gpu.measured_tflops else f"assumed from the data sheet's {gpu.tflops:g}, not measured"
    ceiling = f"{gpu.ceiling_tflops:.0f} TFLOP/s ({known})"
    table = _table(f"Training by cause, at {step.utilization:.0%} of {ceiling}", ("", "share"))
    for name, seconds in sorted(step.parts.items(), key=lambda item: -item[1]):
        if abs(share := seconds / step.training) >= _LEAST_SHOWN:
            table.add_row(name, f"{share:.1%}")
    return table


def _workings(config: RunConfig, plan: Plan) -> Iterator[str]:
    """Yield the inputs of the figures."""
    engine, work, step = plan.engine, plan.workload, plan.step
    if engine is not None:
        yield (
            f"engines: {counted(config.rollout.num_engines, 'engine')} of {counted(engine.gpus, 'GPU')}; KV cache of "
            f"one: {engine.kv_tokens:,} tokens of {memory_text(engine.kv_bytes_per_token)} per GPU, "
            f"{counted(engine.longest_sequences, 'sequence')} of {config.max_model_len:,} tokens"
        )
    for role in config.roles.with_workers if plan.references else ():
        size = counted(role.parallel.world_size, "GPU")
        yield f"{role.name}s: {counted(role.workers, 'worker')} of {size}, scoring during generation"
    if work is not None and step is not None:
        yield (
            f"step: {work.samples:,} sequences of {work.mean_prompt:,g} + {work.mean_response:,g} tokens, "
            f"{work.micro_batches} micro-batches per replica and update; {step.model_flops:.3g} FLOP"
        )
        if config.rollout.agent.is_set and not config.supervised:
            yield "one call of each agent; give --mean_prompt and --mean_response for rows of several"
        yield _assumptions(config, plan)
    layers = {kind.estimate.layers for kind in plan.kinds}
    yield f"planned layers: {', '.join(sorted(layers))}; Transformer Engine's keep less; recompute: {plan.recompute}"


def _assumptions(config: RunConfig, plan: Plan) -> str:
    hardware, sheet = plan.hardware, GPUS[config.cluster.gpu]
    nvlink = f"NVLink {hardware.gpu.nvlink_gb_per_s:g}, " if hardware.gpus_per_node > 1 else ""
    sync = f", weight sync by {plan.transport} at {SYNC_GB_PER_S[plan.transport]:g} GB/s" if plan.transport else ""
    return (
        f"assumed, not measured: {hardware.matmul_efficiency:.0%} of {sheet.ceiling_tflops:.0f} TFLOP/s in matrix "
        f"products, {hardware.attention_efficiency:.0%} in attention, {hardware.memory_efficiency:.0%} of "
        f"{sheet.memory_gb_per_s:,g} GB/s memory bandwidth, {hardware.link_efficiency:.0%} of links ({nvlink}network "
        f"{hardware.network_gb_per_s:g}, host {hardware.host_gb_per_s:g} GB/s per GPU){sync}"
    )
