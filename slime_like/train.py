"""The training loop: rollouts, score, train, sync, save."""

from __future__ import annotations

import time

from slime_like.config import RunConfig
from slime_like.observability.phases import PhaseClock
from slime_like.orchestration.session import Session
from slime_like.orchestration.step import StepRecorder, TrainSummary, score, update


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
        clock, synced, reference = PhaseClock(), None, None
        for step in range(done + 1, config.steps + 1):
            trajectories = session.source.next_batch(step, clock)
            batch = session.batcher.batch(trajectories)
            with clock.phase("sync"):
                session.turns.training()
            session.trainers.load_batch(batch.replicas)
            if not config.supervised:
                with clock.phase("score"):
                    reference = score(session, trajectories, step)
            with clock.phase("train"):
                updates = update(session, batch)
            if session.rollout:
                with clock.phase("sync"):
                    synced = session.rollout.sync.run(version=step)
                session.rollout.source.trained(trajectories, step)
                session.rollout.source.synced(version=step)
            recorder.record(step, trajectories, batch, updates, reference, synced, clock.finish())
            if recorder.evaluate_and_save(step):
                clock.finish()  # neither belongs to a step
        return recorder.finish(wall_s=time.monotonic() - started)
