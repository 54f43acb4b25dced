"""The verdict on a plan in sentences: does it fit, and what limits the step."""

from collections.abc import Iterator

from slime_like.planning.engines import Generation
from slime_like.planning.result import Plan
from slime_like.planning.units import memory_text, seconds_text, significant
from slime_like.system.words import counted

_SHORT_S = 1.0
"""Predicted steps below this are dominated by what is not predicted: kernel launches, and calls between processes."""

PHASES = {
    "generation": "generation",
    "references": "reference workers (during generation)",
    "scoring": "scoring",
    "training": "training",
    "sync": "weight sync",
    "moving": "moves to and from host memory",
}


def verdict(plan: Plan) -> str:
    """Return the first line: whether the run fits, and the free GPU memory."""
    if plan.problems:
        count = counted(len(plan.problems), "problem")
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
        yield (
            f"Predicted step: {seconds_text(step.total)}. In such a small run, kernel launches and calls between "
            "processes take longer; they are not predicted."
        )
    else:
        speed = significant(work.samples * work.mean_length / step.total / plan.gpus_in_use)
        yield f"Predicted step: {seconds_text(step.total)}, {speed} tokens/s per GPU."
    longest = max(PHASES, key=lambda name: getattr(step, name))
    share, detail = getattr(step, longest) / step.total, ""
    if longest == "training":
        detail = f"; {step.utilization:.0%} of the GPUs' matrix-product ceiling"
    elif longest == "generation" and found is not None:
        detail = f"{', during training' if step.overlapped else ''}; {_token_text(found)}"
    yield f"Limited by {PHASES[longest]}: {min(1.0, share):.0%} of the step{detail}."
    if found is not None and found.waves > 1 and plan.engine is not None:
        fitting = int(plan.engine.kv_tokens / work.mean_length)
        limit = "more do not fit its KV cache" if found.at_once >= fitting else "its limit of concurrent requests"
        yield (
            f"{counted(plan.run.config.rollout.num_engines, 'engine')}: each decodes {found.at_once:,} of its "
            f"{found.sequences:,} sequences at the same time ({limit}), so generation takes {found.waves} waves."
        )


def _token_text(found: Generation) -> str:
    parts = {"reading weights": found.weights, "reading KV cache": found.cache, "messages": found.messages}
    if found.products > found.weights + found.cache:
        parts = {"matrix products": found.products, "messages": found.messages}
    named = " + ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts.items() if seconds)
    return f"a token takes {seconds_text(found.token)} ({named})"
