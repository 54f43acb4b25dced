"""``slime-like verify engine``."""

import argparse
import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from slime_like.checks.definition import Needs
from slime_like.commands.command import Command, flag_names, has_flag, option, temporary_run_dir
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError
from slime_like.system.words import counted

_FAILS = 1
_NEEDS: Needs = frozenset({"files", "run", "model", "weights", "engine"})


def _run(options: argparse.Namespace, flags: list[str]) -> int:
    from slime_like.examples.look_alike import make_look_alike
    from slime_like.examples.tiny_model import make_tiny_model
    from slime_like.orchestration.run.directory import run_directory

    with tempfile.TemporaryDirectory(prefix="slime-like-model-") as directory:
        model = Path(directory)
        if options.model is None:
            make_tiny_model(model)
        else:
            make_look_alike(options.model, model, with_vocabulary=False)
        config = _config(model, flags)
        with run_directory(config.run_dir, temporary=not has_flag(flags, "run_dir")):
            return _try_all(config)


def _try_all(config: RunConfig) -> int:
    from slime_like.verification.engine.verify import verify_engine

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
    print(f"{config.rollout.engine}: {len(verdicts) - failed} of {counted(len(verdicts), 'claim')} hold")
    return _FAILS if failed else 0


def _config(model: Path, flags: Sequence[str]) -> RunConfig:
    """Raise ``ConfigError`` for settings that are not the engine's."""
    if others := [n for n in flag_names(flags) if not n.startswith("rollout.") and n not in ("run_dir", "model.dtype")]:
        problems = [f"--{name} is not an engine setting; give rollout.*, model.dtype or run_dir" for name in others]
        raise ConfigError(problems, code="flag-excluded")
    import torch

    from slime_like.checks.check import require_valid
    from slime_like.verification.engine.verify import LONGEST_PROMPT, LONGEST_RESPONSE

    default = "bfloat16" if torch.cuda.is_available() else "float32"  # CUDA's kernels require bfloat16
    settings = ["--model.path", str(model), "--model.dtype", default, "--data.max_prompt_tokens", str(LONGEST_PROMPT)]
    settings += ["--rollout.max_new_tokens", str(LONGEST_RESPONSE)]
    config = load_config(None, [*settings, *flags], temporary_run_dir("verify"))
    if config.rollout.python is not None:
        raise ConfigError(
            f"rollout.python={config.rollout.python}: the engine runs in this interpreter; run slime-like with that "
            "interpreter, and omit the setting",
            code="flag-excluded",
        )
    require_valid(config, _NEEDS)
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


COMMAND = Command(
    "verify engine",
    "check the installed engine with a small model: logprobs, seeds, updates of every tensor",
    _run,
    "Start the installed engine in this process with a small random model like DIR, and check what training\n"
    "needs. transformers' forward pass is the reference. Each tensor is changed by itself, and the engine's\n"
    "logprobs must follow. Gaps are in nats for float32, in standard deviations for bfloat16. Exit code 1: a claim\n"
    "does not hold.",
    (option("--model", type=Path, metavar="DIR", help="only its config.json is read (default: a tiny Qwen3)"),),
    "[--model DIR] [--model.dtype bfloat16] [--rollout.engine NAME] [--rollout.field VALUE ...]",
)
