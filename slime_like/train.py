"""The training loop: sample, score, train, sync, save.

Work that runs concurrently:

- An event loop in a thread samples and rewards groups: with ``rollout.max_staleness`` above 0, for later steps, too.
- With ``rollout.stream``, trainer ranks accumulate windows of a step while its other groups are still being sampled.
- Reference workers score groups while other groups are sampled.
- During a sync, trainer ranks gather the next bucket while engines load the previous one.
- With ``checkpoint.async_save``, ranks write a checkpoint's files during the following steps.

Everything else waits. On shared devices (``cluster.placement: colocated``), trainers and engines take turns.
"""

import time

from slime_like.config import RunConfig
from slime_like.observability.timing import PhaseClock
from slime_like.orchestration.run.milestones import Milestones, TrainSummary
from slime_like.orchestration.run.opening import open_run
from slime_like.orchestration.run.recorder import StepRecorder
from slime_like.orchestration.run.sources import Run
from slime_like.orchestration.run.step import TrainedStep, apply_penalties, optimizer_steps, score, train_critic
from slime_like.orchestration.trainer.batcher import WindowStream
from slime_like.orchestration.trainer.model_ranks import present
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.plugins.options import load_option

_WINDOW = "training on a window"


def train(config: RunConfig) -> TrainSummary:
    """Run ``config.steps`` training steps: RL, or supervised on demonstrations.

    Call ``slime_like.checks.check.require_valid`` first, like the command: it finds all problems before Ray starts.

    Raises:
        SlimeLikeError: anything a user can act on, in one sentence; all processes have ended.
    """
    started = time.monotonic()
    if config.trainer.is_planned:
        config = load_option("memory-planner")(config)
    train_step = _train_on_stream if config.rollout.stream else _train_on_batch
    with open_run(config) as run, StepRecorder(run) as recorder:
        milestones = Milestones(run, recorder)
        with run.progress.waiting("first weight sync"):
            run.source.start(version=run.finished_steps)
        milestones.before_first()
        clock = PhaseClock()
        for step in range(run.finished_steps + 1, config.steps + 1):
            with run.profiling(step):
                trained = train_step(run, step, clock)
                with clock.phase("sync"), run.progress.waiting("syncing weights"):
                    run.reference.refresh(step)
                    run.source.sync(version=step)
            run.source.advance(step, trained.trajectories)
            recorder.record(step, trained, clock.finish())
            milestones.after(step)
            clock.finish()  # records and milestones belong to no step
        return milestones.finish(wall_s=time.monotonic() - started)


def _train_on_batch(run: Run, step: int, clock: PhaseClock) -> TrainedStep:
    """Sample the whole batch, then run its optimizer steps."""
    with run.source.sampling(run.progress):
        trajectories = run.source.next_batch(step, clock)
    batch, updates = run.policy.load_batch(trajectories), []
    with clock.phase("sync"):
        run.devices.training()
    with run.progress.waiting("training"):
        scoring = score(run, trajectories, clock)
        critic, penalties = train_critic(run, trajectories, step, clock)
        penalties |= apply_penalties(run, trajectories, step, clock)
        with clock.phase("train"):
            for index, denominator in optimizer_steps(run, batch, trajectories, step):
                answers = run.policy.start("training", TrainerRank.train_minibatch, index, denominator)
                updates += present(answers.result())[:1]
            learned = [present(answers.result())[0] for answers in critic]
    return TrainedStep(trajectories, updates, scoring, batch.tokens, penalties=penalties, critic=learned)


def _train_on_stream(run: Run, step: int, clock: PhaseClock) -> TrainedStep:
    """Run one optimizer step. Trainers process full windows while other groups are still being sampled.

    Each window has a cost. Trainers therefore get one only when they would idle, with everything that is full by then.
    The rest is the last window. If all groups are ready together, the last window is the whole batch.
    """
    policy, source = run.policy, run.source
    windows = WindowStream(policy.batcher)
    policy.defer(policy.start(_WINDOW, TrainerRank.begin_stream))
    with run.source.sampling(run.progress):
        for groups in source.stream(step, clock):
            holds = source.is_complete(step) or not policy.is_idle()
            if window := windows.add(groups, holds):
                policy.defer(policy.scatter(_WINDOW, TrainerRank.train_window, window, False))
    with clock.phase("train"), run.progress.waiting("training"):
        window, denominator = windows.finish()
        policy.defer(policy.scatter(_WINDOW, TrainerRank.train_window, window, True))
        steps = policy.call("updating", TrainerRank.finish_stream, denominator)
    return TrainedStep.of_stream(windows, steps)
