"""The training loop: rollouts, score, train, sync, save."""

from __future__ import annotations

import time

from slime_like.config import RunConfig
from slime_like.observability.phases import PhaseClock
from slime_like.orchestration.run.session import Session
from slime_like.orchestration.run.step import StepRecorder, TrainedStep, TrainSummary, score, update
from slime_like.orchestration.trainer.window_stream import WindowStream


def train(config: RunConfig) -> TrainSummary:
    """Run ``config.steps`` training steps; RL, or supervised with ``algorithm.loss: sft``.

    Raises:
        SlimeLikeError: anything a user can act on, in one sentence; every process of the run has ended by then.
    """
    started = time.monotonic()
    with Session(config) as session:
        recorder = StepRecorder(session)
        done = session.finished_steps
        if session.rollout:
            session.rollout.sync.run(version=done)
            session.rollout.source.synced(version=done)
            if done == 0:
                recorder.evaluate(step=0)
        clock, synced = PhaseClock(), None
        train_step = _train_on_stream if config.rollout.stream else _train_on_batch
        for step in range(done + 1, config.steps + 1):
            trained = train_step(session, step, clock)
            with clock.phase("sync"):
                session.reference.refresh(step)
            if session.rollout:
                with clock.phase("sync"):
                    synced = session.rollout.sync.run(version=step)
                session.rollout.source.trained(trained.trajectories, step)
                session.rollout.source.synced(version=step)
            recorder.record(step, trained, synced, clock.finish())
            if recorder.evaluate_and_save(step):
                clock.finish()  # neither belongs to a step
        return recorder.finish(wall_s=time.monotonic() - started)


def _train_on_batch(session: Session, step: int, clock: PhaseClock) -> TrainedStep:
    """The whole batch first, then as many optimizer steps as it serves."""
    trajectories = session.source.next_batch(step, clock)
    batch = session.batcher.batch(trajectories)
    with clock.phase("sync"):
        session.turns.training()
    session.trainers.load_batch(batch.replicas)
    reference = None
    if not session.config.supervised:
        with clock.phase("score"):
            reference = score(session, trajectories, step)
    with clock.phase("train"):
        updates = update(session, batch)
    return TrainedStep(trajectories, updates, reference, batch.packed_tokens)


def _train_on_stream(session: Session, step: int, clock: PhaseClock) -> TrainedStep:
    """One optimizer step, whose micro-batches go to the trainers while others are still being sampled."""
    windows = WindowStream(session.batcher)
    session.trainers.begin_stream()
    for groups in session.source.stream(step, clock):
        if window := windows.add(groups):
            session.trainers.send_window(window)
    with clock.phase("train"):
        window, denominator = windows.finish()
        session.trainers.send_window(window, last=True)
        streamed = session.trainers.finish_stream(denominator)
    return TrainedStep.of_stream(windows, streamed, session.config.reference_in_trainer)
