"""A remedy for a run that is too large for its GPUs: one set of changes, planned before it is proposed."""

from slime_like.planning.estimates import Note
from slime_like.planning.fitting import find_fitting
from slime_like.planning.memory import ACTIVATIONS, HEAD, PhaseMemory
from slime_like.planning.plan import make_plan
from slime_like.planning.planned_run import PlannedRun
from slime_like.planning.result import Plan, Remedy
from slime_like.planning.settings import changed
from slime_like.planning.units import memory_text

_SHOWN_BYTES = 2**26


def find_remedy(run: PlannedRun, plan: Plan, note: Note = lambda _: None) -> Remedy | None:
    """Settings that cure the problems of ``plan``, or why none do; none where size is not all that is wrong."""
    if not plan.size_problems or len(plan.size_problems) < len(plan.problems):
        return None
    fitting = find_fitting(run, note)
    if fitting.too_large is not None:
        return Remedy({}, _least_needed(fitting.too_large))
    tried = make_plan(changed(run, fitting.changes), note=note)
    if tried.problems or tried.step is None or not tried.fits:
        return Remedy({}, "; ".join(tried.described))
    host = 0 if tried.host is None else tried.host.total
    return Remedy(fitting.changes, "", tried.tightest, tried.step.total, host)


def _least_needed(phase: PhaseMemory) -> str:
    """The sum of the phase that is too large with every setting that saves memory."""
    items = sorted((item for item in phase.items if item.nbytes >= _SHOWN_BYTES), key=lambda item: -item.nbytes)
    parts = " + ".join(f"{item.name} {memory_text(item.nbytes)}" for item in items)
    sequences = sum(item.nbytes for item in phase.items if item.name in (ACTIVATIONS, HEAD)) > -phase.margin
    shorter = ", shorter sequences" if sequences else ""
    return (
        f"{phase.place} needs at least {memory_text(phase.total)}, and a GPU has {memory_text(phase.capacity)}: "
        f"{parts}; use a smaller model{shorter}, more GPUs, or GPUs with more memory"
    )
