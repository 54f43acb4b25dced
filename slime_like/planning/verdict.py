"""The verdict on a plan in sentences: does it fit, what limits the step, and what would change that."""

from collections.abc import Iterator

from slime_like.config import RunConfig
from slime_like.planning.generation import Generation
from slime_like.planning.result import Plan
from slime_like.planning.settings import flags
from slime_like.planning.step_time import StepTime
from slime_like.planning.units import count_text, memory_text, seconds_text, significant

_SHORT_S = 1.0
"""A predicted step below this is shorter than what is not predicted: launches of kernels, calls between processes."""

_LONG_S = 3600.0
"""A predicted step from this on is remarked on, where this program proposes it."""

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
        return f"; {step.utilisation:.0%} of the GPUs' data-sheet rate"
    if longest != "generation" or plan.generation is None:
        return ""
    found = plan.generation
    parts = {"reading weights": found.weights, "reading KV cache": found.cache, "messages": found.messages}
    if found.products > found.weights + found.cache:
        parts = {"matrix products": found.products, "messages": found.messages}
    named = " + ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts.items() if seconds)
    return f"; a token takes {seconds_text(found.token)} ({named})"


def waves(config: RunConfig, plan: Plan) -> Iterator[str]:
    """Why generation takes several waves, and engines that are faster on the same GPUs."""
    found, step = plan.generation, plan.step
    if found is None or step is None or plan.engine is None:
        return
    if found.waves > 1:
        yield (
            f"{count_text(config.rollout.num_engines, 'engine')}: each decodes {found.at_once:,} of its "
            f"{found.sequences:,} sequences at once ({_limit(config, plan, found)}), so generation takes "
            f"{found.waves} waves."
        )
    better = plan.faster_engines
    if better is None:
        if found.waves > 1 and step.generation > step.total / 2:
            yield "Engines of another number or size are not much faster; add GPUs, or lower rollout.max_new_tokens."
        return
    once = f"{better.generation.at_once:,} of {better.generation.sequences:,} sequences at once"
    left = f"{memory_text(better.tightest.margin)} GPU memory free"
    yield f"Faster: {' '.join(flags(better.changes))}"
    yield (
        f"  gives {once}, {count_text(better.generation.waves, 'wave')}, a step of {seconds_text(better.step.total)} "
        f"instead of {seconds_text(step.total)}, and {left}."
    )


def _limit(config: RunConfig, plan: Plan, found: Generation) -> str:
    assert plan.engine is not None and plan.workload is not None
    fitting = int(plan.engine.kv_tokens / plan.workload.mean_length)
    return "more do not fit its KV cache" if found.at_once >= fitting else "its limit of concurrent requests"


def problems(plan: Plan) -> Iterator[str]:
    """Each problem; with what makes it smaller only where no remedy for all of them was looked for."""
    yield from (f"problem: {text}" for text in (plan.described if plan.remedy is None else plan.problems))


def remedy(plan: Plan, command: list[str]) -> Iterator[str]:
    """The remedy of a run that does not fit; ``command`` is the planned one with the changes."""
    found = plan.remedy
    if found is None:
        return
    if not found.changes or found.tightest is None:
        yield f"No setting fits these GPUs. {found.reason}."
        return
    free, seconds = memory_text(found.tightest.margin), seconds_text(found.seconds)
    host = f", {memory_text(found.host_bytes)} of host memory per node" if found.host_bytes else ""
    yield f"This fits, with {free} GPU memory free{host} and a step of {seconds}:"
    yield f"  {' '.join(command)}"
    if found.seconds >= _LONG_S:
        yield "So long a step is hardly of use: add GPUs, or lower rollout.prompts_per_step or rollout.max_new_tokens."
