"""The training loop: rollouts, score, train, sync, save.

What runs beside what:

- With ``rollout.max_staleness`` above 0, a thread samples and rewards later steps beside this whole loop.
- With ``rollout.stream``, trainer ranks accumulate windows of a step while its other groups are still being sampled.
- Reference workers score groups beside the sampling of others.
- In a sync, trainer ranks gather the next bucket while engines load the one before.
- With ``checkpoint.async_save``, ranks write a checkpoint's files beside the steps that follow it.

Everything else waits: on shared devices (``cluster.placement: colocated``) trainers and engines take turns.
"""

import time

from slime_like.config import RunConfig
from slime_like.observability.phases import PhaseClock
from slime_like.orchestration.run.milestones import Milestones, TrainSummary
from slime_like.orchestration.run.opening import open_run
from slime_like.orchestration.run.recorder import step_recorder
from slime_like.orchestration.run.run import Run
from slime_like.orchestration.run.step import TrainedStep, score, update
from slime_like.orchestration.trainer.batcher import WindowStream
from slime_like.planning.recompute import chosen_recompute


def train(config: RunConfig) -> TrainSummary:
    """Run ``config.steps`` training steps; RL, or supervised with ``algorithm.loss: sft``.

    Call ``slime_like.checks.check.require_valid`` first, as the command does: it finds all problems before Ray starts.

    Raises:
        SlimeLikeError: anything a user can act on, in one sentence; every process of the run has ended by then.
    """
    started = time.monotonic()
    config = chosen_recompute(config)
    train_step = _train_on_stream if config.rollout.stream else _train_on_batch
    with open_run(config) as run:
        recorder = step_recorder(run)
        milestones = Milestones(run, recorder)
        with run.progress.waiting("first weight sync"):
            run.rollout.start(version=run.finished_steps)
        milestones.before_first()
        clock = PhaseClock()
        for step in range(run.finished_steps + 1, config.steps + 1):
            trained = train_step(run, step, clock)
            with clock.phase("sync"), run.progress.waiting("syncing weights"):
                run.reference.refresh(step)
                run.rollout.sync(version=step)
            run.rollout.advance(step, trained.trajectories)
            recorder.record(step, trained, clock.finish())
            if milestones.after(step):
                clock.finish()  # milestones belong to no step
        return milestones.finish(wall_s=time.monotonic() - started)


def _train_on_batch(run: Run, step: int, clock: PhaseClock) -> TrainedStep:
    """The whole batch first, then as many optimizer steps as it serves."""
    with run.rollout.sampling(run.progress):
        trajectories = run.rollout.source.next_batch(step, clock)
    batch = run.batcher.batch(trajectories)
    with clock.phase("sync"):
        run.devices.training()
    run.trainers.training.load_batch(batch.replicas)  # travels while the next call is on its way
    with run.progress.waiting("training"):
        reference = score(run, trajectories, step, clock)
        with clock.phase("train"):
            updates = update(run, batch)
    return TrainedStep(trajectories, updates, reference, batch.tokens)


def _train_on_stream(run: Run, step: int, clock: PhaseClock) -> TrainedStep:
    """Run one optimizer step: trainers work on its full windows while its other groups are being sampled.

    Each window costs time. So trainers get one when they would idle, with all that is full by then, and the rest is the
    last; where all groups are there at once, that is the whole batch.
    """
    windows, training, source = WindowStream(run.batcher), run.trainers.training, run.rollout.source
    training.begin_stream()
    with run.rollout.sampling(run.progress):
        for groups in source.stream(step, clock):
            holds = source.is_complete(step) or not training.is_idle()
            if window := windows.add(groups, holds):
                training.send_window(window)
    with clock.phase("train"), run.progress.waiting("training"):
        window, denominator = windows.finish()
        training.send_window(window, last=True)
        streamed = training.finish_stream(denominator)
    return TrainedStep.of_stream(windows, streamed, run.config.reference_in_trainer)
