"""``slime-like verify layouts``, ``verify engine`` and ``verify objective``."""

import argparse
import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from slime_like.checks import RANKS, Needs, loading_needs
from slime_like.commands.command import Command, flag_names, has_flag, option, temporary_run_dir
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.errors import FAILED, ConfigError
from slime_like.models.dimensions import ModelDimensions
from slime_like.system.words import pluralize
from slime_like.verification.layouts import (
    DEFAULT_LAYOUTS,
    ONE_RANK,
    ROUTED_BFLOAT16,
    ROUTED_NOTE,
    parse_layout,
    step_flags,
    tolerances_of,
)

if TYPE_CHECKING:
    from slime_like.trajectory import ScoredTrajectory

_FIXED = ("model.path", "trainer.optimizer.distributed", "trainer.optimizer.overlap")
_ENGINE_NEEDS: Needs = frozenset({"files", "run", "model", "weights", "engine"})
_DEFAULT = f"those that fit of: {' '.join(DEFAULT_LAYOUTS)}"


def _verify_layouts(options: argparse.Namespace, flags: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="slime-like-model-") as directory:
        model: Path = options.model or Path(directory)
        if options.model is None:
            from slime_like.examples.tiny_model import make_tiny_model

            make_tiny_model(model, num_hidden_layers=4)  # two stages of two chunks
        baseline = parse_layout(options.baseline)
        layouts = [parse_layout(name) for name in options.layouts or DEFAULT_LAYOUTS]
        config = _layout_config(model, flags, synthetic=options.batch is None)
        from slime_like.verification.verify import LayoutResult, print_table, verify_layouts  # imports torch and Ray

        temporary = not has_flag(flags, "run_dir")
        batch = _batch(options.batch, model)
        required = options.layouts is not None
        steps = f"{pluralize(len(batch), 'sequence')}, {pluralize(config.steps, 'optimizer step')}"
        rows: list[LayoutResult] = []
        try:
            rows += verify_layouts(config, baseline, layouts, batch, required=required, temporary=temporary)
        finally:  # an interrupt keeps the rows so far
            left = [
                LayoutResult(one.name, one.parallel.world_size, skipped="not compared")
                for one in layouts[len(rows) - 1 :]
            ]
            if rows:
                print_table(f"Differences from {baseline.name} ({config.model.dtype}, {steps})", rows + left)
        if tolerances_of(config.model.dtype, ModelDimensions.from_checkpoint(model)) is ROUTED_BFLOAT16:
            print(ROUTED_NOTE)
        return 0 if all(row.verdict in ("same", "skipped") for row in rows) else FAILED


def _layout_config(model: Path, flags: Sequence[str], synthetic: bool) -> RunConfig:
    """Return the configuration. The user's flags take precedence over those chosen here."""
    fixed = [name for name in flag_names(flags) if name.startswith("trainer.parallel.") or name in _FIXED]
    if fixed:
        problems = [f"--{name}: layouts are given by --layouts, the model by --model" for name in fixed]
        raise ConfigError(problems, code="flag-excluded")
    import torch

    default = "bfloat16" if torch.cuda.is_available() else "float32"  # CUDA's kernels require bfloat16
    load, given = partial(load_config, None, run_dir=temporary_run_dir("verify")), ["--model.path", str(model)]
    dtype = load([*given, "--model.dtype", default, *flags]).model.dtype
    settings = step_flags(ModelDimensions.from_checkpoint(model), dtype)
    settings += ["--model.dtype", dtype, "--steps", "2" if dtype == "float32" else "1"]
    if synthetic:
        from slime_like.verification.comparison import SYNTHETIC_BUDGET

        settings += ["--trainer.target_tokens_per_batch", str(SYNTHETIC_BUDGET)]
    config = load([*given, *settings, *flags])
    from slime_like.checks.check import require_valid

    require_valid(config, loading_needs(config.model, RANKS))
    return config


def _batch(file: Path | None, model: Path) -> "list[ScoredTrajectory]":
    from slime_like.data.dump import load_trajectories
    from slime_like.verification.comparison import require_fit, synthetic_batch

    dimensions = ModelDimensions.from_checkpoint(model)
    batch = synthetic_batch(dimensions) if file is None else load_trajectories(file)
    require_fit(batch, dimensions, "the synthetic batch" if file is None else str(file))
    return batch


LAYOUTS = Command(
    "verify layouts",
    "compare logprobs, loss, gradients and weights of every layout with one rank",
    _verify_layouts,
    "Run one batch under every layout that fits this machine or cluster. Compare per-token logprobs,\n"
    "loss, every tensor's gradient, and the weights after training with one rank. Exit code 1: a layout\n"
    "differs; the first differing token, gradient and tensor are named.",
    (
        option("--model", type=Path, metavar="DIR", help="on every node (default: a tiny Qwen3, on this machine)"),
        option("--layouts", nargs="+", metavar="NAME", help=f"such as tp2-sp-pp2 (default: {_DEFAULT})"),
        option("--baseline", default=ONE_RANK, metavar="NAME", help="layout to compare with (default: one rank)"),
        option("--batch", type=Path, metavar="FILE", help="rollouts of debug.save_rollouts (default: synthetic ones)"),
    ),
    "[--model DIR] [--layouts NAME ...] [--batch FILE] [--section.field VALUE ...]",
    epilog="Every field of the configuration is a flag: see `slime-like train --help`. --cluster.address joins a\n"
    "running cluster; --steps is the number of optimizer steps.",
)


def _verify_engine(options: argparse.Namespace, flags: list[str]) -> int:
    from slime_like.examples.look_alike import make_look_alike
    from slime_like.examples.tiny_model import make_tiny_model
    from slime_like.orchestration.run.directory import run_directory

    with tempfile.TemporaryDirectory(prefix="slime-like-model-") as directory:
        model = Path(directory)
        if options.model is None:
            make_tiny_model(model)
        else:
            make_look_alike(options.model, model, with_vocabulary=False)
        config = _engine_config(model, flags)
        with run_directory(config.run_dir, temporary=not has_flag(flags, "run_dir")):
            return _try_all(config)


def _try_all(config: RunConfig) -> int:
    from slime_like.verification.engine.claims import verify_engine

    log = config.run_dir / "worker_logs" / "engine.log"
    log.parent.mkdir(exist_ok=True)
    verdicts = []
    with _output_to(log) as terminal:
        print(f"{'':5} {'gap':>8} {'time':>8}  claim", file=terminal, flush=True)
        for verdict in verify_engine(config):
            verdicts.append(verdict)
            gap = "" if verdict.gap is None else f"{verdict.gap:.1e}"
            holds = "holds" if verdict.problem is None else "FAILS"
            print(f"{holds} {gap:>8} {verdict.seconds:6.1f} s  {verdict.claim}", file=terminal)
            if verdict.problem is not None:
                print(f"{'':24} {verdict.problem}", file=terminal)
            terminal.flush()
        gc.collect()  # collected engines print messages
    failed = sum(verdict.problem is not None for verdict in verdicts)
    print(f"{config.rollout.engine}: {len(verdicts) - failed} of {pluralize(len(verdicts), 'claim')} hold")
    return FAILED if failed else 0


def _engine_config(model: Path, flags: Sequence[str]) -> RunConfig:
    """Raise ``ConfigError`` for settings that are not the engine's."""
    if others := [n for n in flag_names(flags) if not n.startswith("rollout.") and n not in ("run_dir", "model.dtype")]:
        problems = [f"--{name} is not an engine setting; give rollout.*, model.dtype or run_dir" for name in others]
        raise ConfigError(problems, code="flag-excluded")
    import torch

    from slime_like.checks.check import require_valid
    from slime_like.verification.engine.claims import LONGEST_PROMPT, LONGEST_RESPONSE

    default = "bfloat16" if torch.cuda.is_available() else "float32"  # CUDA's kernels require bfloat16
    settings = ["--model.path", str(model), "--model.dtype", default, "--data.max_prompt_tokens", str(LONGEST_PROMPT)]
    settings += ["--rollout.max_new_tokens", str(LONGEST_RESPONSE)]
    config = load_config(None, [*settings, *flags], temporary_run_dir("verify"))
    if config.rollout.python is not None:
        remedy = "run slime-like with that interpreter, and omit the setting"
        problem = f"rollout.python={config.rollout.python}: the engine runs in this interpreter; {remedy}"
        raise ConfigError(problem, code="flag-excluded")
    require_valid(config, _ENGINE_NEEDS)
    return config


@contextlib.contextmanager
def _output_to(log: Path) -> Iterator[TextIO]:
    """Redirect the output of this process and its children to ``log``, and yield the original standard output."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    usual = [os.dup(stream.fileno()) for stream in (sys.stdout, sys.stderr)]
    with log.open("wb") as file, os.fdopen(os.dup(usual[0]), "w") as terminal:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield terminal
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for number, descriptor in enumerate(usual, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)


ENGINE = Command(
    "verify engine",
    "check the installed engine with a small model: logprobs, seeds, updates of every tensor",
    _verify_engine,
    "Start the installed engine in this process with a small random model like DIR, and check what training\n"
    "needs. transformers' forward pass is the reference. Each tensor is changed by itself, and the engine's\n"
    "logprobs must follow. Gaps are in nats for float32, in standard deviations for bfloat16. Exit code 1: a claim\n"
    "does not hold.",
    (option("--model", type=Path, metavar="DIR", help="only its config.json is read (default: a tiny Qwen3)"),),
    "[--model DIR] [--model.dtype bfloat16] [--rollout.engine NAME] [--rollout.field VALUE ...]",
)


def _verify_objective(options: argparse.Namespace, flags: list[str]) -> int:
    config = load_config(options.config, ["--model.path", "none-is-loaded", *flags], temporary_run_dir("verify"))
    from slime_like.checks.names import advantage_name_problems, algorithm_name_problems, option_problems

    named = [*algorithm_name_problems(config.algorithm), *advantage_name_problems(config.algorithm)]
    if problems := named or list(option_problems(config.algorithm)):
        raise ConfigError(problems)
    from slime_like.verification.objective import sentences, verify_objective, verify_parts  # imports torch

    findings, is_whole = [*verify_parts(config)], not (config.supervised or config.algorithm.chooses_tokens)
    findings += verify_objective(config) if is_whole else []
    print(*sentences(findings), sep="\n")
    if not is_whole:
        print(f"algorithm.loss={config.algorithm.loss}: compared only in parts, not as a whole objective of samples")
    wrong = sum(finding.is_wrong for finding in findings)
    print(f"{len(findings) - wrong} of {pluralize(len(findings), 'comparison')} are as documented")
    return FAILED if wrong else 0


OBJECTIVE = Command(
    "verify objective",
    "compare the expected gradient of the objective with the true one, by enumeration",
    _verify_objective,
    "Enumerate every batch of responses of a tiny policy, in float64, and compare the expected gradient of the\n"
    "configured loss, advantages, reduction and corrections with the gradient of the expected reward, of the KL and\n"
    "of the entropy: on-policy, with an engine that rounds, in later updates and with stale samples, as far as the\n"
    "run has them. A critic is assumed to be exact. A bias is attributed to settings: what remains if one of them\n"
    "were exact. Each part is also compared with its documented gradient, custom code with the one that it declares.\n"
    "Exit code 1: a part differs from it, or the whole gradient does not point uphill. No model is loaded.",
    paths={"[CONFIG.yaml]": "configuration of the run (default: only the flags)"},
    usage="[--section.field VALUE ...]",
)
