"""The commands that a launch runs: ``slime-like plan`` on node 0, then ``slime-like train``."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from slime_like.config import RunConfig
from slime_like.config.launch import LaunchOptions, launch_directory
from slime_like.errors import FAILED, LaunchError
from slime_like.launch.exit import Verdict
from slime_like.system.subcommand import Child

_STOP_S = 10.0


def train_arguments(options: LaunchOptions, cluster: str | None) -> list[str]:
    address = ["--cluster.address", cluster] if cluster else []
    return ["train", *([str(options.config)] if options.config else []), *options.flags, *address]


def plan_arguments(options: LaunchOptions, config: RunConfig) -> list[str]:
    """Build the arguments of ``plan`` for the started cluster; the plan is also written to a file."""
    preflight = ["--preflight", "--output", str(_plan_path(config))]
    return ["plan", *([str(options.config)] if options.config else []), *preflight, *options.flags]


def run_plan(options: LaunchOptions, config: RunConfig, environment: Mapping[str, str]) -> Verdict:
    """Plan unless the options say otherwise; where the run does not fit, standard output has the reasons in full."""
    if not options.plan:
        return Verdict(0)
    path = _plan_path(config)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    verdict = run_command(plan_arguments(options, config), environment, options.stop_s)
    return Verdict(verdict.code, f"slime-like plan: {why_it_does_not_fit(path)}") if path.is_file() else verdict


def why_it_does_not_fit(output: Path) -> str:
    """The problems of a plan that was written to ``output``, as one sentence."""
    problems = json.loads(output.read_text(encoding="utf-8"))["problems"]
    return "; ".join(problems) or "it needs more memory than a GPU has; its table on node 0 lists where"


def run_command(
    arguments: list[str], environment: Mapping[str, str], stop_s: float, watch: Callable[[], None] = lambda: None
) -> Verdict:
    """Run ``slime-like ARGUMENTS`` to its end; ``watch`` is called meanwhile, and what it raises ends the command."""
    with Child(arguments, environment, stop_s) as child:
        try:
            code = child.wait(watch)
        except LaunchError:
            child.stop(_STOP_S)  # a part of the run is gone, so that it cannot end in good order
            raise
        return Verdict(code if code >= 0 else FAILED, f"{child.command}: {child.sentence()}" if code else "")


def _plan_path(config: RunConfig) -> Path:
    return launch_directory(config.run_dir) / "plan.json"
