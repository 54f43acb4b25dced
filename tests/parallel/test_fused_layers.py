"""Layers on a CPU by kernels, and the same layers by torch's operators: one step, one result."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backends.megatron import fused_layers
from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.config import RunConfig
from slime_like.interfaces import RankPlacement
from slime_like.trajectory import PackedTrajectory
from tests.parallel.parity import Settings, parity_config
from tests.parallel.ranks import run_each, run_ranks
from tests.parallel.steps import gradients_of, running
from tests.parallel.tiny import save_checkpoint, scored_sequences

LENGTHS = [(5, 9), (3, 1), (17, 20), (2, 31)]
FAMILIES = ("qwen3", "qwen2", "llama", "qwen3_moe")


def _step(
    placement: RankPlacement, config: RunConfig, pack: PackedTrajectory, longest: int
) -> tuple[dict[str, Tensor], int]:
    """Gradients of a step, and how often attention was fused in it."""
    fused = 0
    forward = fused_layers.FusedAttention.forward

    def counting(*arguments: object) -> Tensor:
        nonlocal fused
        fused += 1
        return forward(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_layers.FusedAttention, "forward", staticmethod(counting))
        patch.setattr(fused_layers, "LONGEST", longest)
        found = gradients_of(placement, config, pack)
    return found, fused


@pytest.mark.parametrize("layout", [{}, {"tensor": 2, "sequence": True}], ids=["single", "tp2-sp"])
def test_gradients_are_those_of_torch(layout: Settings, tmp_path: Path) -> None:
    pack, tasks = pack_sequences(scored_sequences(LENGTHS)), []
    for checkpoint in (save_checkpoint(family, tmp_path / family) for family in FAMILIES):
        for kernels, longest in (("auto", 48), ("auto", 30), ("off", 48)):
            tasks.append((parity_config(checkpoint, tmp_path, layout | {"cpu_kernels": kernels}), pack, longest))
    results = iter(run_each(_step, tasks[0][0].trainer.parallel.world_size, tmp_path / "ranks", tasks))
    for family, cases in zip(FAMILIES, zip(results, results, results, strict=True), strict=True):
        for (ours, times), (long, none), (wanted, never) in zip(*cases, strict=True):
            assert times > 0 and none == never == 0, family  # one sequence of the pack is longer than 30 tokens
            assert ours.keys() == long.keys() == wanted.keys()  # grouped experts are parameters of their own, too
            for name, reference in wanted.items():
                bound = 2e-5 * float(reference.abs().max()) + 1e-7
                for one in (ours[name], long[name]):
                    torch.testing.assert_close(one, reference, rtol=0, atol=bound, msg=f"{family}: {name}")


def test_bfloat16_gradients_are_no_further_from_float32_than_those_of_torch(tmp_path: Path) -> None:
    """Of ratios that are 1: at a clip's edge, rounding decides whether a token has a gradient."""
    pack, tasks = pack_sequences(scored_sequences(LENGTHS)), []
    pack.old_logprobs = None
    for checkpoint in (save_checkpoint(family, tmp_path / family) for family in FAMILIES[:3]):
        for dtype, kernels in (("bfloat16", "auto"), ("bfloat16", "off"), ("float32", "off")):
            tasks.append((parity_config(checkpoint, tmp_path, {"cpu_kernels": kernels}, dtype), pack, 48))
    results = iter(run_each(_step, 1, tmp_path / "ranks", tasks))
    for family, cases in zip(FAMILIES[:3], zip(results, results, results, strict=True), strict=True):
        ((ours, times),), ((torchs, never),), ((exact, _),) = cases
        assert times > 0 and never == 0
        far = [sum(float((each[name] - exact[name]).square().sum()) for name in exact) for each in (ours, torchs)]
        whole = sum(float(each.square().sum()) for each in exact.values())
        assert 0 < far[0] < 1.1 * far[1] < 0.01 * whole, family


def _parts_by_kernels(placement: RankPlacement, config: RunConfig, numba: bool) -> set[str]:
    """What computes by kernels in a trainer of ``config``: classes of modules, and that of the head's rows.

    Args:
        numba: it is installed.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not numba:
            patch.setitem(sys.modules, "numba", None)
        with running(placement, config, scores=True) as trainer:
            found = {type(module) for chunk in trainer.chunks for module in chunk.modules()}
            found |= {type(chunk.rows) for chunk in trainer.chunks}
    return {kind.__name__ for kind in found if kind.__name__.startswith("Fused")}


EVERY = {"FusedNorm", "FusedLayer", "FusedMLP", "FusedSelfAttention", "FusedLogitRows"}


@pytest.mark.parametrize(
    ("kernels", "numba", "expected"), [("auto", True, EVERY), ("off", True, set()), ("auto", False, set())]
)
def test_the_setting_and_the_install_decide_what_computes(
    kernels: str, numba: bool, expected: set[str], qwen3: Path, tmp_path: Path
) -> None:
    config = parity_config(qwen3, tmp_path, {"cpu_kernels": kernels})
    (found,) = run_ranks(_parts_by_kernels, 1, tmp_path / "ranks", config, numba)
    assert found == expected


def _mlp_rows(placement: RankPlacement, config: RunConfig, pack: PackedTrajectory) -> list[int]:
    """Of how many tokens each layer's MLP computes, in the first of two micro-batches."""
    rows = []
    forward = fused_layers.FusedMLP.forward

    def counting(self: fused_layers.FusedMLP, hidden_states: Tensor, **options: object) -> object:
        rows.append(len(hidden_states))
        return forward(self, hidden_states, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_layers.FusedMLP, "forward", counting)
        gradients_of(placement, config, pack)
    return rows[:4]


@pytest.mark.parametrize("sequence", [False, True])
def test_no_rank_computes_what_follows_a_prompt(sequence: bool, qwen3: Path, tmp_path: Path) -> None:
    """In the last layer; of sequence-parallel tokens a rank has others than it scores."""
    config = parity_config(qwen3, tmp_path, {"tensor": 2, "sequence": sequence, "cpu_kernels": "auto"})
    pack = pack_sequences(scored_sequences(LENGTHS))
    responses, every = sum(response for _, response in LENGTHS), sum(map(sum, LENGTHS))
    found = run_ranks(_mlp_rows, 2, tmp_path / "ranks", config, pack)
    wanted = [every // 2] * 4 if sequence else [every] * 3 + [responses]
    assert found == [wanted, wanted]


def test_attention_over_context_ranks_is_not_fused(qwen3: Path, tmp_path: Path) -> None:
    config = parity_config(qwen3, tmp_path, {"context": 2, "cpu_kernels": "auto"})
    world, pack = config.trainer.parallel.world_size, pack_sequences(scored_sequences(LENGTHS))
    ranks = run_ranks(_step, world, tmp_path / "ranks", config, pack, 48)
    assert [fused for _, fused in ranks] == [0] * len(ranks)
