"""``slime-like verify objective``."""

import argparse

from slime_like.commands.command import Command, temporary_run_dir
from slime_like.config.reading.load import load_config
from slime_like.errors import FAILED, ConfigError
from slime_like.system.words import counted


def _run(options: argparse.Namespace, flags: list[str]) -> int:
    config = load_config(options.config, ["--model.path", "none-is-loaded", *flags], temporary_run_dir("verify"))
    from slime_like.checks.names import advantage_name_problems, algorithm_name_problems, option_problems

    named = [*algorithm_name_problems(config.algorithm), *advantage_name_problems(config.algorithm)]
    if problems := named or list(option_problems(config.algorithm)):
        raise ConfigError(problems)
    from slime_like.verification.objective.verify import sentences, verify_objective, verify_parts  # imports torch

    findings, is_whole = [*verify_parts(config)], not (config.supervised or config.algorithm.chooses_tokens)
    findings += verify_objective(config) if is_whole else []
    print(*sentences(findings), sep="\n")
    if not is_whole:
        print(f"algorithm.loss={config.algorithm.loss}: compared only in parts, not as a whole objective of samples")
    wrong = sum(finding.is_wrong for finding in findings)
    print(f"{len(findings) - wrong} of {counted(len(findings), 'comparison')} are as documented")
    return FAILED if wrong else 0


COMMAND = Command(
    "verify objective",
    "compare the expected gradient of the objective with the true one, by enumeration",
    _run,
    "Enumerate every batch of responses of a tiny policy, in float64, and compare the expected gradient of the\n"
    "configured loss, advantages, reduction and corrections with the gradient of the expected reward, of the KL and\n"
    "of the entropy: on-policy, with an engine that rounds, in later updates and with stale samples, as far as the\n"
    "run has them. A critic is assumed to be exact. A bias is attributed to settings: what remains if one of them\n"
    "were exact. Each part is also compared with its documented gradient, custom code with the one that it declares.\n"
    "Exit code 1: a part differs from it, or the whole gradient does not point uphill. No model is loaded.",
    paths={"[CONFIG.yaml]": "configuration of the run (default: only the flags)"},
    usage="[--section.field VALUE ...]",
)
