"""``slime-like verify layouts``."""

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slime_like.checks.definition import RANKS, loading_needs
from slime_like.commands.command import Command, flag_names, has_flag, option, temporary_run_dir
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError
from slime_like.models.dimensions import ModelDimensions
from slime_like.system.words import counted
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
_DIFFERS = 1
_DEFAULT = f"those that fit of: {' '.join(DEFAULT_LAYOUTS)}"


def _run(options: argparse.Namespace, flags: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="slime-like-model-") as directory:
        model: Path = options.model or Path(directory)
        if options.model is None:
            from slime_like.examples.tiny_model import make_tiny_model

            make_tiny_model(model, num_hidden_layers=4)  # two stages of two chunks
        baseline = parse_layout(options.baseline)
        layouts = [parse_layout(name) for name in options.layouts or DEFAULT_LAYOUTS]
        config = _config(model, flags, synthetic=options.batch is None)
        from slime_like.verification.verify import Row, print_table, verify_layouts  # imports torch and Ray

        temporary = not has_flag(flags, "run_dir")
        batch = _batch(options.batch, model)
        required = options.layouts is not None
        steps = f"{counted(len(batch), 'sequence')}, {counted(config.steps, 'optimizer step')}"
        rows: list[Row] = []
        try:
            rows += verify_layouts(config, baseline, layouts, batch, required=required, temporary=temporary)
        finally:  # an interrupt keeps the rows so far
            left = [Row(one.name, one.parallel.world_size, skipped="not compared") for one in layouts[len(rows) - 1 :]]
            if rows:
                print_table(f"Differences from {baseline.name} ({config.model.dtype}, {steps})", rows + left)
        if tolerances_of(config.model.dtype, ModelDimensions.from_checkpoint(model)) is ROUTED_BFLOAT16:
            print(ROUTED_NOTE)
        return 0 if all(row.verdict in ("same", "skipped") for row in rows) else _DIFFERS


def _config(model: Path, flags: Sequence[str], synthetic: bool) -> RunConfig:
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


COMMAND = Command(
    "verify layouts",
    "compare logprobs, loss, gradients and weights of every layout with one rank",
    _run,
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
