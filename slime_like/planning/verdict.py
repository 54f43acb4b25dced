"""The verdict on a plan in sentences: does it fit, and what limits the step."""

from collections.abc import Iterator

from slime_like.config import RunConfig
from slime_like.planning.generation import Generation
from slime_like.planning.result import Plan
from slime_like.planning.step_time import StepTime
from slime_like.planning.units import count_text, memory_text, seconds_text, significant

_SHORT_S = 1.0
"""A predicted step below this is shorter than what is not predicted: launches of kernels, calls between processes."""

PHASES = {
    "generation": "generation",
    "references": "reference workers (beside generation)",
    "scoring": "scoring",
    "training": "training",
    "sync": "weight sync",
    "moving": "moves to and from host memory",
}


def verdict(plan: Plan) -> str:
    """The first line: whether it fits, and the GPU memory that is left."""
    if plan.problems:
        suffices = ", but GPU memory suffices" if plan.kinds and not plan.size_problems else ""
        return f"does not fit: {count_text(len(plan.problems), 'problem')}{suffices}."
    if plan.tightest is None:
        return "fits."
    return f"fits. Least free GPU memory: {memory_text(plan.tightest.margin)} ({plan.tightest.place})."


def host_verdict(plan: Plan) -> str:
    """Host memory: the need, and whether it was compared with what a node has."""
    if plan.host is None or not plan.host.items:
        return ""
    needed = f"{memory_text(plan.host.total)} per node"
    if plan.host.capacity is None:
        return f"warning: host memory was NOT checked: {needed} needed; give --cluster.host_memory_gib"
    left = plan.host.capacity - plan.host.total
    return f"Host memory needed: {needed}; {memory_text(left)} are left for processes." if left >= 0 else ""


def step_lines(plan: Plan) -> Iterator[str]:
    """The length of a step, its throughput and what limits it."""
    step, work = plan.step, plan.workload
    if step is None or work is None:
        return
    if step.total < _SHORT_S:
        yield (
            f"Predicted step: {seconds_text(step.total)}. In so small a run, kernel launches and calls between "
            "processes take longer; they are not predicted."
        )
    else:
        speed = significant(plan.tokens_per_gpu_second)
        yield f"Predicted step: {seconds_text(step.total)}, {speed} tokens/s per GPU."
    longest = max(("generation", "references", "scoring", "training", "sync", "moving"), key=lambda n: getattr(step, n))
    share = getattr(step, longest) / step.total
    beside = ", beside training" if step.overlapped and longest == "generation" else ""
    yield f"Limited by {PHASES[longest]}: {min(1.0, share):.0%} of the step{beside}{_detail(longest, plan, step)}."


def _detail(longest: str, plan: Plan, step: StepTime) -> str:
    if longest == "training":
        return f"; {step.utilisation:.0%} of the GPUs' matrix-product ceiling"
    if longest != "generation" or plan.generation is None:
        return ""
    found = plan.generation
    parts = {"reading weights": found.weights, "reading KV cache": found.cache, "messages": found.messages}
    if found.products > found.weights + found.cache:
        parts = {"matrix products": found.products, "messages": found.messages}
    named = " + ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts.items() if seconds)
    return f"; a token takes {seconds_text(found.token)} ({named})"


def waves(config: RunConfig, plan: Plan) -> Iterator[str]:
    """Say why generation takes several waves."""
    found = plan.generation
    if found is not None and found.waves > 1:
        yield (
            f"{count_text(config.rollout.num_engines, 'engine')}: each decodes {found.at_once:,} of its "
            f"{found.sequences:,} sequences at once ({_limit(config, plan, found)}), so generation takes "
            f"{found.waves} waves."
        )


def _limit(config: RunConfig, plan: Plan, found: Generation) -> str:
    assert plan.engine is not None and plan.workload is not None
    fitting = int(plan.engine.kv_tokens / plan.workload.mean_length)
    return "more do not fit its KV cache" if found.at_once >= fitting else "its limit of concurrent requests"
