"""Goals for the measurements, and whether they are met."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.algorithms.measure import Row

Tables = Mapping[str, Sequence[Row]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``goal``: the goal in words. ``found``: the measured number. ``met``: whether it meets the goal."""

    goal: str
    found: float
    met: bool


def verdicts(tables: Tables) -> list[Verdict]:
    """Return one verdict per goal of the sections that were run."""
    judges: dict[str, Callable[[Sequence[Row]], Iterator[Verdict]]] = {
        "packing": _packing,
        "reduction": _reduction,
        "logprobs": _logprobs,
        "partition": _partition,
    }
    return [verdict for name, rows in tables.items() if name in judges for verdict in judges[name](rows)]


def _at_least(goal: str, found: float, bound: float) -> Verdict:
    return Verdict(goal, found, found >= bound)


def _at_most(goal: str, found: float, bound: float) -> Verdict:
    return Verdict(goal, found, found <= bound)


def _value(rows: Sequence[Row], case: str, form: str) -> float:
    """Return the value of the only row whose case and form start like this."""
    found = [row.value for row in rows if row.case == case and row.form.startswith(form)]
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows of {case!r}, {form!r}; goals and rows no longer fit, adapt goals.py")
    return found[0]


def _packing(rows: Sequence[Row]) -> Iterator[Verdict]:
    for case, lists, ours in (
        ("pack 1,000 x 512 tokens", "python lists", "pack_sequences"),
        ("the same with three logprobs and versions", "python lists", "pack_sequences"),
    ):
        speedup = _value(rows, case, lists) / _value(rows, case, ours)
        yield _at_least(f"{case}: at least 20 times as fast as lists", speedup, 20.0)


def _reduction(rows: Sequence[Row]) -> Iterator[Verdict]:
    for prefix in ("sum of sample means", "the same with backward"):
        for count, bound in ((10, 1.0), (1000, 4.0)):
            case = f"{prefix}, {count}"
            goal = f"{case}: at least {bound:g} times as fast as the loop"
            yield _at_least(goal, _loop(rows, case) / _value(rows, case, "sum_of_sample_mean"), bound)


def _loop(rows: Sequence[Row], case: str) -> float:
    """Return the value of the loop, not of its compiled form."""
    return next(row.value for row in rows if row.case == case and row.form == "split and loop")


def _logprobs(rows: Sequence[Row]) -> Iterator[Verdict]:
    ours, plain = "logprobs_and_entropy", "log_softmax, gather"
    for case in ("logprobs, forward", "logprobs, forward and backward"):
        ratio = _value(rows, case, ours) / _value(rows, case, plain)
        yield _at_most(f"{case}: at most 1.2 times the time of {plain}, which has no entropy", ratio, 1.2)
    extra = next(row for row in rows if row.case == "logprobs, extra peak memory" and row.form == ours)
    share = float(re.match(r"[\d.]+", extra.note).group())  # type: ignore[union-attr]
    yield _at_most("logprobs, extra peak memory: at most 1/8 of the logits", share, 0.125)


def _partition(rows: Sequence[Row]) -> Iterator[Verdict]:
    for case in dict.fromkeys(row.case for row in rows):
        note = next(row.note for row in rows if row.case == case and row.form == "micro-batches")
        excess = float(re.search(r"\(([-+][\d.]+)%\)", note).group(1))  # type: ignore[union-attr]
        yield _at_most(f"{case}: at most 3 % more micro-batches than first-fit-decreasing", excess, 3.0)
        yield _at_most(f"{case}: rank imbalance under 2 %", _value(rows, case, "rank imbalance"), 2.0)
        yield _at_most(f"{case}: 10,000 sequences in under 1,000 ms", _value(rows, case, "time"), 1000.0)
