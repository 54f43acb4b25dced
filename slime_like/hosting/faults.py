"""Errors of engines, as sentences."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from slime_like.errors import LIKELY_KILLER, EngineError, SlimeLikeError


def one_line(error: BaseException) -> str:
    """Format the error on one line, with its type unless it is from this package, without pydantic's count and URLs."""
    text = str(error)
    if isinstance(error, ValidationError):
        details = error.errors(include_url=False, include_context=False, include_input=False)
        pairs = ((".".join(map(str, detail["loc"])), detail["msg"]) for detail in details)
        text = "; ".join(f"{place}: {problem}" if place else problem for place, problem in pairs)
    kind = "" if isinstance(error, SlimeLikeError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{text}".split())[:500]


def code_of(error: BaseException, other: str) -> str:
    """Return the error's code, or ``other`` for errors from outside this package."""
    return error.code if isinstance(error, SlimeLikeError) else other


@dataclass(frozen=True, slots=True)
class EngineFaults:
    """Errors of the engine ``name``. Its log is in ``run_dir``."""

    name: str
    run_dir: Path

    @property
    def log(self) -> str:
        return f"its log is in {self.run_dir}/worker_logs"

    def start_timeout(self, timeout_s: float) -> EngineError:
        problem = f"{self.name} did not start within rollout.start_timeout_s={timeout_s:g} s"
        return EngineError(problem, code="engine-start-timeout")

    def start_failed(self, reason: str, remedy: str = "") -> EngineError:
        return EngineError(f"{self.name} did not start: {reason}", code="engine-start-failed", remedy=remedy)

    def not_running(self) -> EngineError:
        return EngineError(f"{self.name} is not running", code="engine-not-running", remedy="call start first")

    def died(self, when: str = "") -> EngineError:
        """Build the error of a dead process. ``when`` says when it died, if known ("during resume")."""
        problem, who = (f"{self.name} died {when}", "") if when else ("its process has died", self.name)
        return EngineError(problem, code="engine-died", who=who, remedy=f"{LIKELY_KILLER}, and {self.log}")
