"""Windows of micro-batches run forward and backward without the host waiting for its device.

Every attention that a CPU has, in both backends, under a device that cannot be read (``strict``): scored, then trained
in one window and in two, by an objective with everything that is per sequence in it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from backends.common.attention import flash_attn_on_cpu
from backends.common.step.objective import Objective
from backends.fsdp.trainer import FsdpTrainer
from backends.megatron.micro_batch import BatchBuilder
from backends.megatron.trainer import MegatronTrainer
from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.config import RunConfig
from slime_like.interfaces import RankPlacement
from slime_like.trajectory import PackedTrajectory
from tests.parallel.parity import PACKS, TAIL
from tests.parallel.ranks import run_each
from tests.parallel.strict import StrictDevice, WaitsForDevice
from tests.parallel.tiny import scored_sequences

ALGORITHM = {
    "loss": "gspo",
    "kl_coef": 0.05,
    "entropy_coef": 0.01,
    "importance_correction": "truncate",
    "importance_level": "sequence",
    "off_policy_mask": 0.1,
}


def _config(checkpoint: Path, run_dir: Path, backend: str, context: int, attention: str) -> RunConfig:
    return RunConfig(
        run_dir=run_dir,
        model={"path": checkpoint, "dtype": "float32"},
        data={"max_prompt_tokens": 61},
        rollout={"max_new_tokens": 31},
        algorithm=ALGORITHM,
        trainer={
            "backend": backend,
            "parallel": {"context": context},
            "attention": attention,
            "cpu_kernels": "off",
            "optimizer": {"lr": 1e-3},
            "step_timeout_s": 60.0,
            "cpu_threads": 1,
        },
    )


def _packs() -> list[PackedTrajectory]:
    """The first with padding at its end; of a sequence with one response token one context rank has no row."""
    sequences = iter(scored_sequences([lengths for pack in PACKS for lengths in pack], fully_masked=(7,)))
    parts = [[next(sequences) for _ in lengths] for lengths in PACKS]
    budget = sum(s.total_len for s in parts[0]) + TAIL
    return [pack_sequences(part, target_tokens_per_batch=budget if part is parts[0] else None) for part in parts]


def _read_back_in_the_loss(patch: pytest.MonkeyPatch) -> None:
    """The bug."""
    correct = Objective.add

    def add(self: Objective, step: Any, given: Any, pack: PackedTrajectory, *scored: Tensor) -> Tensor:
        assert int(pack.targets.max()) >= 0
        return correct(self, step, given, pack, *scored)

    patch.setattr(Objective, "add", add)


def _windows(placement: RankPlacement, config: RunConfig, bug: Callable[[pytest.MonkeyPatch], None] | None) -> int:
    """How many operations ran under the strict device."""
    trainer = (MegatronTrainer if config.trainer.backend == "megatron" else FsdpTrainer)(config, placement)
    trainer.setup()
    packs = _packs()
    try:
        with pytest.MonkeyPatch.context() as patch, StrictDevice() as device:
            if bug is not None:
                bug(patch)
            # Up to here packs are the host's; the stand-in of flash-attn, too, which is no kernel of a device.
            patch.setattr(BatchBuilder, "build", _as_method(device, BatchBuilder.build))
            patch.setattr(FsdpTrainer, "_batch", _as_method(device, FsdpTrainer._batch))
            patch.setattr(flash_attn_on_cpu, "_parts", device.on_host(flash_attn_on_cpu._parts))
            trainer.score(packs)
            trainer.begin_step()
            trainer.accumulate(packs[:2])
            trainer.accumulate(packs[2:], last=True)
    finally:
        trainer.shutdown()
    return device.watched


def _as_method(device: StrictDevice, method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *arguments, **options: device.on_host(method)(self, *arguments, **options)


def _caught(placement: RankPlacement, config: RunConfig) -> bool:
    try:
        _windows(placement, config, _read_back_in_the_loss)
    except WaitsForDevice as error:
        return "_local_scalar_dense" in str(error)
    return False


LOCAL = [("megatron", "ring"), ("fsdp", "auto")]
SHARED = [("megatron", name) for name in ("ring", "allgather", "ring_flash_attn")]
SHARED += [("fsdp", name) for name in ("auto", "ring_flash_attn")]


@pytest.mark.parametrize(("context", "kinds"), [(1, LOCAL), (2, SHARED)])
def test_the_host_never_waits(context: int, kinds: list[tuple[str, str]], qwen3: Path, tmp_path: Path) -> None:
    tasks = [(_config(qwen3, tmp_path, backend, context, attention), None) for backend, attention in kinds]
    for counts in run_each(_windows, context, tmp_path / "ranks", tasks):
        assert min(counts) > 1000


def test_a_number_read_back_in_the_loss_is_caught(qwen3: Path, tmp_path: Path) -> None:
    tasks = [(_config(qwen3, tmp_path, backend, 1, attention),) for backend, attention in LOCAL]
    assert run_each(_caught, 1, tmp_path / "ranks", tasks) == [(True,), (True,)]
