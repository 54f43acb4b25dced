"""Kill runs: ``python -m benchmarks.kills OUT_DIR RESULT.md``.

Without ``--processes`` the driver is killed at random moments, and the run must end like an undisturbed one
(``resumed.py``). With it, processes of every class are killed and stopped in every phase (``campaign.py``).
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.kills import resumed
from benchmarks.kills.campaign import Campaign, Case, draw
from benchmarks.kills.table import render
from benchmarks.kills.victims import VICTIMS
from slime_like.examples.tiny_model import make_arithmetic_data, make_calculator_data, make_tiny_model
from tests.support.forked_command import worker_server

_CORE = "engine core"
_LONG = 100_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("out", type=Path, help="directory to work in; emptied first")
    parser.add_argument("result", type=Path, help="Markdown file to write")
    parser.add_argument(
        "--processes", nargs="*", metavar="CLASS", help="kill and stop these (reward_worker ...), or all"
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    parser.add_argument("--cases", type=int, help="only so many of all that are drawn, the rest with --go_on later")
    parser.add_argument("--new_interpreters", action="store_true", help="as users start it, instead of forks")
    parser.add_argument("--go_on", action="store_true", help="after the cases that an earlier campaign recorded")
    options = parser.parse_args()
    if not options.go_on:
        shutil.rmtree(options.out, ignore_errors=True)
    make_tiny_model(options.out / "model", family="qwen3", seed=0)
    return _killed_driver(options) if options.processes is None else _killed_processes(options)


def _killed_driver(options: argparse.Namespace) -> int:
    model = options.out / "model"
    make_arithmetic_data(model / "data", seed=0)
    whole, killed = options.out / "undisturbed", options.out / "killed"
    start_s, training_s = resumed.undisturbed(resumed.flags(whole, model, options.steps, options.engine), whole)
    print(f"undisturbed: {start_s:.0f} s to the first step, {training_s:.0f} s from there", flush=True)
    arguments = resumed.flags(killed, model, options.steps, options.engine)
    moments = random.Random(options.seed)
    finished = resumed.disturbed(arguments, killed, options.kills, start_s, training_s, moments)
    outcome = resumed.compare(killed, whole, options.steps, finished)
    text = resumed.render(outcome, options.engine, options.seed)
    options.result.write_text(text, encoding="utf-8")
    print(text)
    return 0 if outcome.largest_gap <= resumed.TOLERANCE else 1


def _killed_processes(options: argparse.Namespace) -> int:
    model = options.out / "model"
    make_calculator_data(model / "data")
    core = [_CORE] if options.engine == "vllm" else [name for name in VICTIMS if name != _CORE]
    cases = draw([name.replace("_", " ") for name in options.processes] or core, options.seed)
    whole, killed = options.out / "undisturbed", options.out / "killed"
    killed.mkdir(exist_ok=options.go_on)
    shutil.rmtree(whole, ignore_errors=True)
    temporary = Path(tempfile.gettempdir(), f"k{os.getpid():x}")  # vLLM's paths must be short
    temporary.mkdir()
    try:
        tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)  # so that leftovers there are the run's
        forked = not options.new_interpreters
        if forked:
            worker_server()  # starts before the campaign counts leftovers
        arguments = _flags(killed, model, _LONG, options.engine)
        campaign = Campaign(arguments, killed, temporary, options.seed, forked)
        done, steps = campaign.run(cases, options.cases), campaign.steps()
        resumed.undisturbed(_flags(whole, model, steps, options.engine), whole)
    finally:
        tempfile.tempdir = None
        shutil.rmtree(temporary)
    _compare(done, killed, whole, steps)
    text = render(done, steps, options.engine, options.seed)
    options.result.write_text(text, encoding="utf-8")
    print(text)
    return 0 if all(case.is_good for case in done) else 1


def _compare(cases: list[Case], ours: Path, theirs: Path, steps: int) -> None:
    """Compare the steps after each case, up to the next one, and record the result."""
    equal = [
        not difference and gap <= resumed.TOLERANCE
        for difference, _, gap in resumed.differences(ours, theirs, range(1, steps + 1))
    ]
    for case, following in zip(cases, [*cases[1:], Case("", "", "", step=steps)], strict=True):
        assert steps > case.step
        case.resumed = (case.step + 1, all(equal[case.step : max(following.step, case.step + 1)]))


def _flags(root: Path, model: Path, steps: int, engine: str) -> list[str]:
    """Conversations, two rewards and a reference worker: a process of every class.

    The transformers engine takes one request at a time. Otherwise, which turns share a batch depends on timing, and the
    last digits of a matrix product depend on the batch, so that two undisturbed runs would differ.
    """
    one_request_at_a_time = ["--rollout.engine_args", "{transformers: {max_batch_size: 1}}"]
    return [
        "train", "configs/calculator.yaml",
        "--run_dir", str(root / "run"),
        "--model.path", str(model),
        "--data.train", str(model / "data" / "train.jsonl"),
        "--evaluation.files", "[]",
        "--evaluation.every", "0",
        "--steps", str(steps),
        "--rollout.engine", engine,
        *one_request_at_a_time,
        "--rollout.prompts_per_step", "16",
        "--rollout.samples_per_prompt", "4",
        "--reward.functions",
        "[{name: math_verify}, {name: environment}, {name: format, options: {pattern: '.*[a-m].*'}}]",
        "--algorithm.kl.coef", "0.01",
        "--reference.placement", "workers",
        "--trainer.optimizer.warmup_steps", "0",
        "--trainer.optimizer.decay", "constant",
        "--trainer.cpu_threads", "1",
        "--checkpoint.every", "3",
        "--checkpoint.export_hf", "false",
        "--debug.save_rollouts", str(root / "rollouts"),
        "--logging.progress", "plain",
        "--logging.tensorboard", "false",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
