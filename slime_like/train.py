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
from slime_like.orchestration.run.step import train_on_batch, train_on_stream
from slime_like.plugins.options import load_option


def train(config: RunConfig) -> TrainSummary:
    """Run ``config.steps`` training steps: RL, or supervised on demonstrations.

    Call ``slime_like.checks.check.require_valid`` first, like the command: it finds all problems before Ray starts.

    Raises:
        SlimeLikeError: anything a user can act on, in one sentence; all processes have ended.
    """
    started = time.monotonic()
    if config.trainer.is_planned:
        config = load_option("memory-planner")(config)
    train_step = train_on_stream if config.rollout.stream else train_on_batch
    with open_run(config) as run, StepRecorder(run) as recorder:
        milestones = Milestones(run, recorder)
        capsules = load_option("capsules")(run) if config.debug.capsule else None
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
            alarms = recorder.record(step, trained, clock.finish(f"step {step}"))
            if capsules is not None:
                capsules.record(step, trained, any(alarm.severity != "cleared" for alarm in alarms))
            milestones.after(step)
            run.write_timeline(step)
            clock.finish("records and milestones")  # they belong to no step
        return milestones.finish(wall_s=time.monotonic() - started)
