"""Render the records of killed and stopped processes as Markdown."""

import datetime
from collections.abc import Sequence

from benchmarks.kills.campaign import DEATH_S, HANG_S, Case


def render(cases: Sequence[Case], steps: int, engine: str, seed: int) -> str:
    """Return a summary, then a row per case."""
    bad = [case for case in cases if not case.is_good]
    lines = [
        f"Processes killed and stopped, {datetime.date.today()}, engine {engine}, seed {seed}, "
        f"`python -m benchmarks.kills OUT_DIR RESULT.md --processes --engine {engine}`.",
        "",
        f"- {len(cases)} cases in one run of {steps} steps, which was started again after each end.",
        f"- Outside the bounds ({DEATH_S:.0f} s for a death, {HANG_S:.0f} s for a hang), with another's name, with "
        f"leftovers, or unequal after it: {len(bad)}.",
    ]
    for how, bound in (("SIGKILL", DEATH_S), ("SIGSTOP", HANG_S)):
        ended = [case.seconds for case in cases if case.how == how and case.outcome == "ended"]
        if ended:
            lines.append(
                f"- {how}: {len(ended)} of {sum(case.how == how for case in cases)} ended the run, with a sentence "
                f"after {min(ended):.1f} to {max(ended):.1f} s (bound {bound:.0f} s); the others went on."
            )
    lines += [
        "",
        "| process | how | phase | outcome | s | code | steps equal from | left | sentence |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    order = sorted(cases, key=lambda case: (case.victim, case.how, case.phase))
    return "\n".join([*lines, *map(_row, order), ""])


def _row(case: Case) -> str:
    mark = "" if case.is_good else " **!**"
    resumed = "" if case.resumed is None else f"{case.resumed[0]}: {'yes' if case.resumed[1] else '**no**'}"
    left = "; ".join(case.left) or "-"
    code = "-" if case.code is None else str(case.code)
    sentence = case.sentence.replace("|", "\\|")[:240]
    return (
        f"| {case.victim}{mark} | {case.how} | {case.phase} | {case.outcome} | {case.seconds:.1f} | {code} "
        f"| {resumed} | {left} | {sentence} |"
    )
