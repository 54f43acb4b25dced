"""Text of a plan on the terminal, at most 80 columns wide: the verdict in sentences first, then tables."""

import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich import box
from rich.table import Table

from slime_like.planning.memory import ENGINES, PhaseMemory
from slime_like.planning.plan import Plan
from slime_like.planning.search import Candidate
from slime_like.system.console import Console
from slime_like.system.words import memory_text, pluralize, seconds_text, significant

_WIDTH = 80
_MOST_PHASES = 4
_SHORT_S = 1.0
"""Predicted steps below this are dominated by what is not predicted: kernel launches, and calls between processes."""

_PHASES = {
    "generation": "generation",
    "references": "reference workers (during generation)",
    "scoring": "scoring",
    "critic": "critic, before the policy",
    "training": "training",
    "sync": "weight sync",
    "moving": "moves to and from host memory",
}


def print_plan(plan: Plan, stream: TextIO | None = None) -> None:
    console = _console(stream or sys.stdout)
    lines = list(filter(None, (verdict(plan), host_verdict(plan), _subject(plan))))
    lines += [f"problem: {problem}" for problem in plan.problems]
    if plan.fits:
        lines += ["", *step_lines(plan)]
    console.print(*lines, sep="\n", markup=False)
    _print_memory(console, plan)
    if (step := plan.step) is not None:
        table = _table(console, "Predicted time of a step", ("phase", "time", "share"))
        for phase, name in _PHASES.items():
            if seconds := getattr(step, phase):
                table.add_row(name, seconds_text(seconds), f"{seconds / step.total:.0%}")
        table.add_section()
        table.add_row("whole step" + (", phases overlap" if step.overlapped else ""), seconds_text(step.total), "")
        console.print(table)
    notes = [f"note: {note}" for note in plan.notes]
    notes.append(f"planned in {seconds_text(plan.seconds)}")
    console.print("", *_workings(plan), *notes, sep="\n", markup=False)


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
    columns = ("t", "p", "c", "d", "e", "tokens", "recompute", "step", "trainer", "ceiling", "free")
    table = _table(console, title, columns)
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
    console.print(table)
    console.print(f"\nthe first: {found[0].flags}", markup=False, soft_wrap=True)


def _console(stream: TextIO) -> Console:
    width = min(_WIDTH, Console(file=stream).width) if stream.isatty() else _WIDTH
    return Console(file=stream, width=width, highlight=False)


def _table(console: Console, title: str, columns: Sequence[str]) -> Table:
    """Print the title, over the whole width, and return an empty table. Columns of names are justified to the left."""
    console.print(f"\n[bold]{title}[/bold]")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "phase") else "right")
    return table


def _subject(plan: Plan) -> str:
    config, hardware = plan.run.config, plan.run.hardware
    nodes, gpus = pluralize(plan.nodes, "node"), pluralize(hardware.gpus_per_node, "GPU")
    chosen = " (the number needed: cluster.nodes is not set)" if config.cluster.nodes is None else ""
    colocated = config.cluster.placement == "colocated"
    shared = "trainers and engines share them" if colocated else "engines on separate GPUs"
    needed = f"{pluralize(plan.gpus_in_use, 'GPU')} needed" + ("" if config.supervised else f", {shared}")
    gpu = f"{config.cluster.gpu} with {memory_text(hardware.memory_bytes)}"
    return f"{config.model.path.name} on {nodes} of {gpus}{chosen}, {gpu}; {needed}."


def verdict(plan: Plan) -> str:
    """Return the first line: whether the run fits, and the free GPU memory."""
    if plan.problems:
        count = pluralize(len(plan.problems), "problem")
        return f"cannot start: {count}. GPU memory suffices." if plan.kinds and plan.fits else f"does not fit: {count}."
    tightest = min(plan.phases, key=lambda phase: phase.margin)
    return f"fits. Least free GPU memory: {memory_text(tightest.margin)} ({tightest.place})."


def host_verdict(plan: Plan) -> str:
    """Return the host memory needed, and how it compares to a node's; "" if there is nothing to say."""
    if plan.host is None or not plan.host.items:
        return ""
    needed = f"{memory_text(plan.host.total)} per node"
    if plan.host.capacity is None:
        return f"warning: host memory was NOT checked: {needed} needed; give --cluster.host_memory_gib"
    left = plan.host.capacity - plan.host.total
    return f"Host memory needed: {needed}; {memory_text(left)} are left for processes." if left >= 0 else ""


def step_lines(plan: Plan) -> Iterator[str]:
    """Yield the duration of a step, its throughput and what limits it."""
    step, work, found = plan.step, plan.run.workload, plan.generation
    if step is None:
        return
    if step.total < _SHORT_S:
        small = "Kernel launches and calls between processes, which take longer in such a small run, are not predicted"
        yield f"Predicted step: {seconds_text(step.total)}. {small}."
    else:
        speed = significant(work.samples * work.mean_length / step.total / plan.gpus_in_use)
        yield f"Predicted step: {seconds_text(step.total)}, {speed} tokens/s per GPU."
    longest = max(_PHASES, key=lambda name: getattr(step, name))
    share, detail = getattr(step, longest) / step.total, ""
    if longest == "training":
        detail = f"; {step.utilization:.0%} of the GPUs' matrix-product ceiling"
    elif longest == "generation" and found is not None:
        detail = f"{', during training' if step.overlapped else ''}; a token takes {seconds_text(found.token.seconds)}"
    yield f"Limited by {_PHASES[longest]}: {min(1.0, share):.0%} of the step{detail}."
    if found is None or plan.engine is None:
        return
    engines = pluralize(plan.run.config.rollout.num_engines, "engine")
    if found.at_once < found.sequences:
        fitting = int(plan.engine.kv_tokens / (work.mean_length + plan.engine.state_tokens))
        limit = "more do not fit its KV cache" if found.at_once >= fitting else "its limit of concurrent requests"
        decodes = f"each decodes {found.at_once:,} of its {found.sequences:,} sequences at the same time ({limit})"
        yield f"{engines}: {decodes}."
    if found.tail > 0.1 * found.seconds:
        share = f"for {found.tail / found.seconds:.0%} of generation, less than half of a batch is decoded"
        yield f"The longest response has {found.longest:,.0f} tokens: {share}."


def _print_memory(console: Console, plan: Plan) -> None:
    """Print a column per phase and a row per item, for the kind of ranks with the least free memory in that phase.

    If there are too many phases, the ones with the most free memory are left out.
    """
    found: dict[tuple[bool, str], PhaseMemory] = {}
    for phase in plan.phases:
        key = (phase.gpus == ENGINES, phase.phase)
        if key not in found or phase.margin < found[key].margin:
            found[key] = phase
    tightest = sorted(found.values(), key=lambda phase: phase.margin)[:_MOST_PHASES]
    shown = [phase for phase in found.values() if phase in tightest]
    heads = ["\n".join(filter(None, (phase.phase, phase.kind))) for phase in shown]
    table = _table(console, "Memory per phase, on the GPU with the least free memory", ["", *heads])
    for name in dict.fromkeys(name for phase in shown for name, nbytes in phase.items.items() if nbytes):
        sizes = [phase.items.get(name, 0) for phase in shown]
        table.add_row(name, *(memory_text(size) if size else "" for size in sizes))
    table.add_section()
    for name, field in (("sum", "total"), ("GPU", "capacity"), ("free", "margin")):
        table.add_row(name, *(memory_text(getattr(phase, field)) for phase in shown))
    console.print(table)


def _workings(plan: Plan) -> Iterator[str]:
    config, engine, work = plan.run.config, plan.engine, plan.run.workload
    if engine is not None:
        states = f", each with states of {engine.state_tokens:,} tokens' size" if engine.state_tokens else ""
        engines = f"{pluralize(config.rollout.num_engines, 'engine')} of {pluralize(engine.gpus, 'GPU')}"
        cache = f"{engine.kv_tokens:,} tokens of {memory_text(engine.kv_bytes_per_token)} per GPU"
        holds = f"{pluralize(engine.longest_sequences, 'sequence')} of {config.max_model_len:,} tokens{states}"
        yield f"engines: {engines}; KV cache of one: {cache}, {holds}"
    for role in config.roles.with_workers if plan.references else ():
        size = pluralize(role.parallel.world_size, "GPU")
        yield f"{role.name}: {pluralize(role.workers, 'worker')} of {size}, scoring during generation"
    if plan.step is not None:
        packs = f"{pluralize(work.micro_batches, 'micro-batch')} per replica and update"
        yield f"step: {work.samples:,} sequences of {work.mean_prompt:,g} + {work.mean_response:,g} tokens, {packs}"
        if config.rollout.agent.is_set and not config.supervised:
            yield "one call of each agent; give --mean_prompt and --mean_response for rows of several"
        hardware, gpu = plan.run.hardware, plan.run.hardware.gpu
        nvlink = f"NVLink {gpu.nvlink_gb_per_s:g}, " if hardware.gpus_per_node > 1 else ""
        assumed = hardware.assumed
        rate = plan.transport and assumed.sync_gb_per_s[plan.transport]
        sync = f", weight sync by {plan.transport} at {rate:g} GB/s" if plan.transport else ""
        yield (
            f"assumed, not measured: {assumed.matmul:.0%} of {gpu.ceiling_tflops:.0f} TFLOP/s in matrix "
            f"products, {assumed.attention:.0%} in attention, {assumed.memory:.0%} of "
            f"{gpu.memory_gb_per_s:,g} GB/s memory bandwidth, {assumed.link:.0%} of links ({nvlink}network "
            f"{hardware.network_gb_per_s:g}, host {hardware.host_gb_per_s:g} GB/s per GPU){sync}; all of it is in "
            "docs/planning.md"
        )
    layers = ", ".join(sorted({kind.estimate.layers for kind in plan.kinds}))
    yield f"planned layers: {layers}; Transformer Engine's keep less; recompute: {config.trainer.recompute}"
