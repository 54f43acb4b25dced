"""Choice of the operators that compute on a CPU: the Numba kernels or torch's. Imports neither."""

from importlib.util import find_spec
from typing import Literal


def kernels_are_used(setting: Literal["auto", "off"]) -> bool:
    """True where the Numba kernels compute what they serve; ``setting`` is ``trainer.cpu_kernels``."""
    return setting == "auto" and find_spec("numba") is not None


def operators_note(setting: Literal["auto", "off"]) -> str:
    """Line of a run's log: the operators that compute on a CPU."""
    if kernels_are_used(setting):
        return "CPU operators: Numba kernels where available, else torch's"
    missing = "numba is not installed; the extra train includes it"
    return f"CPU operators: only torch's ({'trainer.cpu_kernels=off' if setting == 'off' else missing})"
