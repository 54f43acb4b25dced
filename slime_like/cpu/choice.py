"""Choice of the operators that compute on a CPU: the Numba kernels or torch's. Imports neither."""

from importlib.util import find_spec
from typing import Literal


def reason_against_kernels(setting: Literal["auto", "off"]) -> str | None:
    """Why torch's operators compute everything; None where the Numba kernels compute what they serve.

    Args:
        setting: ``trainer.cpu_kernels``.
    """
    if setting == "off":
        return "trainer.cpu_kernels=off"
    if find_spec("numba") is None:
        return "numba is not installed; the extra slime-like[train] brings it"
    return None


def operators_note(setting: Literal["auto", "off"]) -> str:
    """Line of a run's log: the operators that compute on a CPU."""
    reason = reason_against_kernels(setting)
    if reason is None:
        return "CPU operators: Numba kernels where they serve, torch's for the rest"
    return f"CPU operators: torch's alone ({reason})"


def kernels_are_used(setting: Literal["auto", "off"]) -> bool:
    """True where the Numba kernels compute what they serve."""
    return reason_against_kernels(setting) is None
