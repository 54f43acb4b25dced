"""Host memory that saving a checkpoint takes."""

from slime_like.interfaces.estimate import TrainerMemory
from slime_like.planning.planned_run import PlannedRun

_MAIN_WEIGHT_BYTES = 4


def save_bytes(run: PlannedRun, memory: TrainerMemory) -> int:
    """Host memory of one rank's save, above what it holds while it trains.

    Assumed: a save copies one tensor at a time to host memory and writes it. The largest is the embedding's main
    weight, float32, of which a rank holds at most its tensor-parallel share. An asynchronous save first copies all
    that it writes: weights, main weights and both moments. Of state that is offloaded already, gradients are the
    fourth part, and are not saved.
    """
    embedding = run.dimensions.vocab_size * run.dimensions.hidden_size // run.config.trainer.parallel.tensor
    in_flight = embedding * _MAIN_WEIGHT_BYTES
    if not run.config.checkpoint.async_save:
        return in_flight
    return in_flight + memory.parameter_bytes + memory.optimizer_bytes + 3 * memory.host_optimizer_bytes // 4
