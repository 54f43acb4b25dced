"""Micro-batches run forward and backward without the host waiting for its device.

Both backends score, then train in two windows on a device that cannot be read (``strict``), with every attention that
exists on a CPU, every kind of layers, low-rank factors and an exact teacher. The objective has all of its per-sequence
terms. Tensor-parallel ranks and pipeline stages exchange activations without waiting, and weights are exported without
waiting. The lines where Megatron waits to exchange experts' tokens are listed one by one, and those that read a step's
losses and norm.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.common.attention import ring_flash_attn
from backends.common.step.balance import BalanceLoss
from backends.common.step.packs import MicroBatch
from backends.common.trainer.base import TrainerBase
from backends.fsdp.trainer import FsdpTrainer
from backends.megatron.micro_batch import BatchBuilder
from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.config import RunConfig
from slime_like.interfaces import RankPlacement
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import PackedTrajectory
from tests.parallel.cases import PACKS, TAIL
from tests.parallel.feature_cases import force_routes, save_teacher
from tests.parallel.ranks import run_each, run_ranks
from tests.parallel.steps import as_critic, running
from tests.parallel.strict import StrictDevice, WaitsForDevice
from tests.parallel.tiny import save_checkpoint, scored_sequences, tiny_config

WIDTH = 48
"""Of the teacher's hidden states."""
ALGORITHM = {
    "loss": "gspo",
    "kl": {"coef": 0.05},
    "entropy_coef": 0.01,
    "importance": {"correction": "truncate", "level": "sequence"},
    "off_policy_mask": 0.1,
}


def _config(
    checkpoint: Path,
    run_dir: Path,
    backend: str,
    layout: dict[str, int],
    attention: str = "auto",
    settings: dict[str, Any] | None = None,
    **algorithm: Any,
) -> RunConfig:
    """``settings``: further ones of the trainer."""
    rate = 1e-3 if ModelDimensions.from_checkpoint(checkpoint).moe_sigmoid else 0.0
    trainer = {"backend": backend, "attention": attention, "optimizer": {"lr": 1e-3}, "router_bias_rate": rate}
    trainer |= settings or {}
    lengths: dict[str, Any] = {"data": {"max_prompt_tokens": 61}, "rollout": {"max_new_tokens": 31}}
    return tiny_config(checkpoint, run_dir, layout, **lengths, algorithm=ALGORITHM | algorithm, trainer=trainer)


def _packs(config: RunConfig) -> list[PackedTrajectory]:
    """Return packs: the first has padding; one context rank has no row of a sequence with one response token."""
    scored = scored_sequences([lengths for pack in PACKS for lengths in pack], fully_masked=(7,))
    if config.algorithm.routing_replay == "rollout":
        force_routes(scored, ModelDimensions.from_checkpoint(config.model.path))
    if config.algorithm.needs_critic:
        for one in scored:
            one.values, one.returns = torch.randn(2, one.response_len)
    if config.distillation.is_set:
        for one in scored:
            one.teacher_hidden = torch.randn(one.response_len, WIDTH)
    sequences = iter(scored)
    parts = [[next(sequences) for _ in lengths] for lengths in PACKS]
    budget = sum(s.total_len for s in parts[0]) + TAIL
    return [pack_sequences(part, target_tokens_per_batch=budget if part is parts[0] else None) for part in parts]


def _read_back_in_the_loss(patch: pytest.MonkeyPatch) -> None:
    correct = TrainerBase.loss_inputs

    def inputs(self: TrainerBase, batch: MicroBatch, *outputs: Tensor) -> Any:
        assert int(batch.pack.targets.max()) >= 0
        return correct(self, batch, *outputs)

    patch.setattr(TrainerBase, "loss_inputs", inputs)


Bug = Callable[[pytest.MonkeyPatch], None]


def _windows(
    placement: RankPlacement, config: RunConfig, bug: Bug | None = None, allowed: frozenset[str] = frozenset()
) -> tuple[int, set[str]]:
    """Return how many operations ran on the strict device, and which of the ``allowed`` lines waited."""
    packs = _packs(config)
    with (
        running(placement, config) as trainer,
        pytest.MonkeyPatch.context() as patch,
        strict_windows(allowed) as device,
    ):
        if bug is not None:
            bug(patch)
        trainer.score(packs, "policy")
        trainer.begin_step(6.0, 60)
        trainer.accumulate(packs[:2])
        trainer.accumulate(packs[2:], last=True)
    return device.watched, set(device.allowed)


@contextlib.contextmanager
def strict_windows(allowed: frozenset[str] = frozenset()) -> Iterator[StrictDevice]:
    with pytest.MonkeyPatch.context() as patch, StrictDevice(allowed) as device:
        # Packs are on the host up to here; the stand-in for flash-attn is not a device's kernel, either.
        patch.setattr(BatchBuilder, "build", _as_method(device, BatchBuilder.build))
        patch.setattr(FsdpTrainer, "_batch", _as_method(device, FsdpTrainer._batch))
        patch.setattr(ring_flash_attn, "_parts", device.on_host(ring_flash_attn._parts))
        patch.setattr(BalanceLoss, "of_step", device.on_host(BalanceLoss.of_step))
        yield device


def _as_method(device: StrictDevice, method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *arguments, **options: device.on_host(method)(self, *arguments, **options)


def _caught(placement: RankPlacement, config: RunConfig) -> bool:
    try:
        _windows(placement, config, _read_back_in_the_loss)
    except WaitsForDevice as error:
        return "_local_scalar_dense" in str(error)
    return False


LOCAL = [("megatron", "ring"), ("fsdp", "auto")]
SHARED = [("megatron", "ring_flash_attn"), ("fsdp", "auto")]
MORE = [("megatron", "ring"), ("megatron", "allgather"), ("fsdp", "ring_flash_attn")]


@pytest.mark.parametrize(
    ("context", "kinds"), [(1, LOCAL), (2, SHARED), pytest.param(2, MORE, marks=pytest.mark.acceptance)]
)
def test_the_host_never_waits(context: int, kinds: list[tuple[str, str]], qwen3: Path, tmp_path: Path) -> None:
    layout = {"context": context}
    tasks = [(_config(qwen3, tmp_path, backend, layout, attention),) for backend, attention in kinds]
    for counts in run_each(_windows, context, tmp_path / "ranks", tasks):
        assert min(count for count, _ in counts) > 1000


def test_reading_a_number_in_the_loss_is_caught(qwen3: Path, tmp_path: Path) -> None:
    tasks = [(_config(qwen3, tmp_path, backend, {}, attention),) for backend, attention in LOCAL]
    assert run_each(_caught, 1, tmp_path / "ranks", tasks) == [(True,), (True,)]


# --------------------------------------------------------------------------------------------- layers, factors, teacher
KINDS = [("megatron", "qwen3_5_text"), ("megatron", "gpt_oss"), ("megatron", "gemma3"), ("fsdp", "qwen3_next")]
OTHERS = [
    ("megatron", "qwen3_next"),
    ("megatron", "mistral"),
    *(("fsdp", each) for each in ("gpt_oss", "mistral", "gemma3")),
]


@pytest.mark.parametrize("kinds", [KINDS, pytest.param(OTHERS, marks=pytest.mark.acceptance)])
def test_no_kind_of_layers_is_waited_for(kinds: list[tuple[str, str]], tmp_path: Path) -> None:
    checkpoints = {family: save_checkpoint(family, tmp_path / family, layers=2) for _, family in kinds}
    tasks = [(_config(checkpoints[family], tmp_path, backend, {}),) for backend, family in kinds]
    for ((count, _),) in run_each(_windows, 1, tmp_path / "ranks", tasks):
        assert count > 1000


def test_factors_and_an_exact_teacher_are_not_waited_for(qwen3: Path, tmp_path: Path) -> None:
    teacher = {"path": save_teacher(tmp_path / "teacher", width=WIDTH), "coef": 0.5, "mode": "exact"}
    sections = [
        {"distillation": {**teacher, "placement": "workers"}},
        {"model": {"path": qwen3, "dtype": "float32", "lora": {"rank": 4, "dropout": 0.1}}},
    ]
    plain = [_config(qwen3, tmp_path, backend, {}) for backend in ("megatron", "fsdp")]
    plain.append(_config(qwen3, tmp_path, "megatron", {}, settings={"activation_offload": True, "recompute": "full"}))
    tasks = [(RunConfig(**{**dict(config), **section}),) for config in plain for section in sections]
    for ((count, _),) in run_each(_windows, 1, tmp_path / "ranks", tasks):
        assert count > 1000


# ----------------------------------------------------------------------------------------------- a step and its export
READS = {
    "megatron": {
        # The norm of each list of tensors, unless Transformer Engine or APEX is installed, and the whole one.
        'utils.py: l2_cuda = torch.tensor([float(l2_reduced)], dtype=torch.float, device="cuda")',
        "clip_grads.py: total_norm = total_norm.item() ** (1.0 / norm_type)",
    },
    "fsdp": {"optimizer.py: return float(total.sqrt())"},
}
LOSSES = "objective.py: for rank, micro_batch in enumerate(everyone.tolist()):"


def _whole_step(placement: RankPlacement, config: RunConfig) -> int:
    """Train, update and export, and check where the host waits. Return how many operations ran on the strict device."""
    packs, reads = _packs(config), READS[config.trainer.backend] | {LOSSES}
    placement = as_critic(placement) if config.algorithm.needs_critic else placement
    with running(placement, config) as trainer, strict_windows(frozenset(reads)) as device:
        trainer.score(packs)
        trainer.begin_step(6.0, 60)
        trainer.accumulate(packs, last=True)
        assert not device.allowed
        trainer.finish_step(6.0)
        assert set(device.allowed) == reads and device.allowed[LOSSES] == 1
        device.allowed.clear()
        exported = sum(len(bucket.tensors) for bucket in trainer.export_weights().buckets)
        assert not device.allowed and (exported > 30 or placement.rank > 0)
    return device.watched


@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [
        (1, [("megatron", {}), ("fsdp", {})]),
        pytest.param(
            2, [("megatron", {"data": 2}), ("megatron", {"tensor": 2}), ("fsdp", {"data": 2})],
            marks=pytest.mark.acceptance,
        ),
    ],
)  # fmt: skip
def test_a_step_waits_for_its_losses_and_norm(
    world_size: int, layouts: list[tuple[str, dict[str, int]]], qwen3: Path, tmp_path: Path
) -> None:
    """Of the policy, and of a critic with a head of values."""
    policies = [_config(qwen3, tmp_path, backend, layout) for backend, layout in layouts]
    values = {"loss": "ppo_clip", "advantage": "gae", "kl": {"coef": 0.0}, "entropy_coef": 0.0, "off_policy_mask": None}
    critics = [_config(qwen3, tmp_path, backend, layout, **values).for_critic() for backend, layout in layouts]
    tasks = [(config,) for config in (*policies, *critics)]
    for counts in run_each(_whole_step, world_size, tmp_path / "ranks", tasks):
        assert min(counts) > 1000


# -------------------------------------------------------------------------------------------- experts, ranks and stages
@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.acceptance)])
def test_experts_on_their_own_rank_are_not_waited_for(family: str, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(family, tmp_path / "model")
    settings: list[dict[str, Any]] = [{"moe_aux_loss_coef": 0.1, "routing_replay": "rollout"}]
    settings.append({"routing_replay": "old", "epochs": 2})
    tasks = [(_config(checkpoint, tmp_path, name, {}, **each),) for name in ("megatron", "fsdp") for each in settings]
    for ((count, _),) in run_each(_windows, 1, tmp_path / "ranks", tasks):
        assert count > 1000


EXCHANGE = frozenset(
    {
        # Once per layer's forward pass: waits until token counts have been copied, which determine message sizes.
        "token_dispatcher.py: self.d2h_event.synchronize()",
        # The copy, which is asynchronous on a GPU, and uses of the counts, which are on the host by then.
        "token_dispatcher.py: self.input_splits = maybe_move_tensor_to_cpu(",
        "token_dispatcher.py: self.output_splits = maybe_move_tensor_to_cpu(",
        "token_dispatcher.py: self.output_splits_tp = maybe_move_tensor_to_cpu(",
        "moe_utils.py: input = torch.split(input, split_sizes.tolist(), dim=0)",
        "moe_utils.py: output = torch.cat([input[i] for i in sorted_idxs.tolist()], dim=0)",
        "moe_utils.py: probs = torch.split(probs, split_sizes.tolist(), dim=0)",
        "moe_utils.py: permuted_probs = torch.cat([probs[i] for i in sorted_idxs.tolist()], dim=0)",
    }
)


@pytest.mark.parametrize(
    ("family", "layout", "allowed"),
    [
        ("qwen3_moe", {"data": 2, "expert": 2}, EXCHANGE),
        ("qwen3", {"pipeline": 2}, frozenset()),
        ("qwen3_5_text", {"tensor": 2, "sequence": True}, frozenset()),
    ],
)
def test_megatron_waits_only_for_counts_of_experts_tokens(
    family: str, layout: dict[str, Any], allowed: frozenset[str], tmp_path: Path
) -> None:
    """Exactly these lines wait; remove one that no longer does from the list."""
    checkpoint = save_checkpoint(family, tmp_path / "model")
    config = _config(checkpoint, tmp_path, "megatron", layout)
    results = run_ranks(_windows, 2, tmp_path / "ranks", config, None, allowed)
    assert min(count for count, _ in results) > 1000
    assert set.union(*(lines for _, lines in results)) == allowed
