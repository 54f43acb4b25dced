"""Which operators compute on a CPU, and the line about it in a run's log."""

import sys

import pytest

from slime_like.cpu.choice import kernels_are_used, operators_note


@pytest.mark.parametrize(
    ("setting", "installed", "note"),
    [
        ("auto", True, "CPU operators: Numba kernels where available, else torch's"),
        ("off", True, "CPU operators: only torch's (trainer.cpu_kernels=off)"),
        (
            "auto",
            False,
            "CPU operators: only torch's (numba is not installed; the extra train includes it)",
        ),
        ("off", False, "CPU operators: only torch's (trainer.cpu_kernels=off)"),
    ],
)
def test_the_choice_and_its_note(setting: str, installed: bool, note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "numba", None)
    assert operators_note(setting) == note  # type: ignore[arg-type]
    assert kernels_are_used(setting) is (setting == "auto" and installed)  # type: ignore[arg-type]
