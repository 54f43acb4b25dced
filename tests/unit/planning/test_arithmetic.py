"""Engines, memory, time and checks of a plan, compared with published figures or manual calculations."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.numpy import save_file

from slime_like.config import LoraConfig, RunConfig
from slime_like.errors import ConfigError
from slime_like.interfaces.estimate import RankEstimate, RankKind, Traffic, TrainerMemory, Work
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.weight_files import header_shapes
from slime_like.planning import checks
from slime_like.planning.generation import predict_generation, token_time
from slime_like.planning.hardware import GIB, Hardware
from slime_like.planning.lengths import Lengths, read_lengths
from slime_like.planning.memory import host_memory, plan_engine, save_bytes, trainer_phases
from slime_like.planning.planned_run import PlannedRun
from slime_like.planning.step_time import pass_seconds, predict_step
from tests.parallel.tiny import save_checkpoint
from tests.unit.checks.checkpoint import DEEPSEEK_V3

MODELS = Path(__file__).parents[3] / "configs" / "models"

# Number of elements in the published safetensors files.
PUBLISHED = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Llama-3.1-8B": 8_030_261_248,
}


# A micro-batch of the default size, 8,192 tokens, holds two of eight sequences of 4,096 tokens.
EIGHT_LONG_SAMPLES: dict[str, Any] = {
    "data": {"max_prompt_tokens": 2048},
    "rollout": {"prompts_per_step": 1, "samples_per_prompt": 8, "max_new_tokens": 2048},
}
# GiB of ``estimate`` without its tensors: a context, and NCCL's buffers of five groups.
RESERVE = 1.5 + 5 * 0.4
# Seconds of a collective of two ranks on one node and on two, without its bytes: NCCL's base and one hop.
IN_NODE_S, ACROSS_S = 8.4e-6 + 3.4e-6, 8.4e-6 + 14e-6
# Seconds of ``estimate`` on H100s: products, attention or the context's messages, and the tensor's messages.
CONTEXT_S = 1e9 / (50e9 * 0.8) + 5 * ACROSS_S
ONE_PASS_S = 4e12 / (790e12 * 0.8) + max(1e12 / (790e12 * 0.63), CONTEXT_S) + 1e9 / (450e9 * 0.8) + 5 * IN_NODE_S


def config(**sections: Any) -> RunConfig:
    base: dict[str, Any] = {"run_dir": "/tmp/none", "model": {"path": MODELS / "Qwen3-32B"}}
    return RunConfig.model_validate(base | sections)


def planned_run(**sections: Any) -> PlannedRun:
    return PlannedRun.of(config(**sections))


def estimate(**memory: int) -> RankEstimate:
    """Return a rank with round numbers, in five groups. Tensor parallelism's messages stay within a node of eight."""
    sizes = dict.fromkeys(TrainerMemory.__dataclass_fields__, 0)
    sizes |= {
        "parameter_bytes": 4 * GIB,
        "trained_bytes": 4 * GIB,
        "gradient_bytes": 8 * GIB,
        "optimizer_bytes": 6 * GIB,
    } | memory
    work = Work(4e12, 1e12, (Traffic("tensor", (0, 7), 10**9, 5), Traffic("context", (7, 8), 10**9, 5)))
    update = Work(0.0, 0.0, (Traffic("data", (7, 8), 10**9, 1),))
    return RankEstimate(0, TrainerMemory(**sizes), work, work, update, 4096, 5, "local layers")


@pytest.mark.parametrize("name", PUBLISHED)
def test_bundled_models_have_the_published_number_of_parameters(name: str) -> None:
    assert ModelDimensions.from_checkpoint(MODELS / name).num_parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    "family",
    ["qwen2", "qwen3_moe", "deepseek_v3", "deepseek_v3_direct", "glm4_moe", "gemma3", "qwen3_next", "qwen3_5_text"],
)
def test_parameters_match_the_stored_tensors(family: str, tmp_path: Path) -> None:
    model = save_checkpoint(family, tmp_path)
    stored = sum(math.prod(shape) for shape in header_shapes(model).values())
    assert ModelDimensions.from_checkpoint(model).num_parameters == stored


def test_engines() -> None:
    """A token takes 64 layers x 2 x 8 heads x 128 x 2 bytes, which is 256 KiB, or 64 KiB on each of 4 GPUs. If there
    are fewer heads than GPUs, they are repeated."""
    engine = plan_engine(planned_run(rollout={"tensor": 4, "max_new_tokens": 1024}, cluster={"gpu": "h100-80gb"}))
    assert engine.kv_bytes_per_token == 64 * 1024
    assert engine.weight_bytes == PUBLISHED["Qwen3-32B"] * 2 // 4
    assert engine.weight_bytes + engine.kv_bytes + engine.reserve_bytes == pytest.approx(0.92 * 79.1 * GIB)
    assert engine.kv_tokens == engine.kv_bytes // (64 * 1024)
    assert engine.longest_sequences == engine.kv_tokens // 2048
    four_heads = plan_engine(planned_run(model={"path": MODELS / "Qwen3-30B-A3B"}, rollout={"tensor": 8}))
    assert four_heads.kv_bytes_per_token == 2 * 48 * 1 * 128 * 2


def test_an_engine_of_qwen3_next_keeps_states(tmp_path: Path) -> None:
    """12 of 48 layers have 2 KV heads of 256. The others have 32 states of 128 x 128 in float32, and convolve 8,192
    channels over 4 tokens. Four GPUs share them."""
    settings = transformers.Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"]).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(settings))
    run = planned_run(model={"path": tmp_path}, rollout={"tensor": 4}, cluster={"gpu": "h200-141gb"})
    engine, states = plan_engine(run), 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2) // 4
    assert engine.kv_bytes_per_token == 12 * 2 * 256 * 2
    assert engine.state_tokens == math.ceil(states / engine.kv_bytes_per_token)
    length = run.config.max_model_len
    assert engine.longest_sequences == engine.kv_bytes // (length * 12 * 2 * 256 * 2 + states) > 500
    found, without = (predict_generation(run, each) for each in (engine, replace(engine, state_tokens=0)))
    moved = found.at_once * 2 * states  # read and written
    assert found.token.cache - without.token.cache == pytest.approx(moved / (4800e9 * 0.6), rel=1e-3)


def test_engines_with_8_bit_matrices() -> None:
    """Embedding and head keep 2 bytes. Each block of 128 x 128 has a scale of 4 bytes."""
    outer = 2 * 151_936 * 5120
    matrices = 64 * (2 * 5120 * 128 * (64 + 8) + 3 * 5120 * 25_600)
    sync = {"quantization": "fp8_blocks"}
    run = planned_run(rollout={"tensor": 4}, sync=sync, algorithm={"importance": {"correction": "truncate"}})
    expected = 2 * outer + matrices + 4 * matrices // 128**2
    assert plan_engine(run).weight_bytes == pytest.approx(expected / 4, rel=1e-4)


def test_an_engine_of_deepseek_v3_on_two_nodes(tmp_path: Path) -> None:
    """16 GPUs hold 1.34 TB of weights: each of the first stage's eight has 31 of 61 layers, and 0.93 GB of embedding.

    A token's latents are 576 values in each layer. Two halves of 64 sequences take turns.
    """
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    rollout: dict[str, Any] = {"engine": "vllm", "tensor": 8, "pipeline": 2}
    sections: dict[str, Any] = {"model": {"path": tmp_path}, "cluster": {"gpu": "h200-141gb"}}
    run = planned_run(**sections, rollout=rollout)
    engine = plan_engine(run)
    outer = 129_280 * 7168 * 2
    assert engine.gpus == 16 and 1.34e12 < run.weight_bytes < 1.345e12
    assert engine.weight_bytes == pytest.approx((outer + (run.weight_bytes - 2 * outer) * 31 / 61) / 8, abs=1)
    assert engine.kv_bytes_per_token == pytest.approx(31 * 576 * 2, abs=1) and engine.kv_tokens > 500_000
    found = token_time(run, engine, 64, 0)
    # A token leaves 248 of 256 experts out; 32 tokens leave out 0.969^32 of them.
    per_token = run.dimensions.num_parameters - run.dimensions.active_parameters
    read = 1 - per_token / (248 / 256) / run.dimensions.num_parameters * (248 / 256) ** 32
    assert found.weights == pytest.approx(2 * engine.weight_bytes / (4800e9 * 0.6) * read) and 0.6 < read < 0.7
    hidden, stages = 32 * 7168 * 2, 32 * 7168 * 2 / (50e9 * 0.8) + 20e-6
    assert found.messages == pytest.approx(stages + 2 * 61 * (20e-6 + 2 * 7 / 8 * hidden / (450e9 * 0.8)))
    wide = planned_run(**sections, rollout=rollout | {"tensor": 16, "pipeline": 1})
    assert plan_engine(wide).weight_bytes == wide.weight_bytes // 16
    # A ring through both nodes has eight network cards, which are slower than NVLink together.
    across = token_time(wide, plan_engine(wide), 64, 0).messages
    assert across == pytest.approx(2 * 61 * (2 * 20e-6 + 2 * 15 / 16 * 2 * hidden / (8 * 50e9 * 0.8)))


def test_activations_and_optimizer_temporaries_share_memory() -> None:
    run = planned_run(rollout={"tensor": 4})
    for memory in ({"activation_bytes": 5 * GIB, "update_bytes": 2 * GIB}, {"update_bytes": 5 * GIB}):
        training = trainer_phases(run, None, RankKind("all", (0,)), estimate(**memory))[0]
        assert training.total / GIB == pytest.approx(4 + 8 + 6 + 5 * 1.05 + RESERVE)


@pytest.mark.parametrize(("tensor", "kept"), [(1, 1.5 + 1), (2, 1.5 + 1 + 2 * 0.4)])
def test_a_sleeping_engine_keeps_its_context_graphs_and_groups(tensor: int, kept: float) -> None:
    run = planned_run(rollout={"tensor": tensor}, cluster={"placement": "colocated"})
    training, *_ = trainer_phases(run, plan_engine(run), RankKind("all", (0,)), estimate())
    assert training.items["sleeping engine (assumed)"] / GIB == pytest.approx(kept)


def test_colocated_devices_never_hold_optimizer_and_cache_together() -> None:
    run = planned_run(rollout={"tensor": 4}, cluster={"placement": "colocated"}, algorithm={"kl": {"coef": 0.1}})
    found = trainer_phases(run, plan_engine(run), RankKind("all", (0,)), estimate())
    phases = {phase.phase: phase.items.keys() for phase in found}
    assert set(phases) == {"training", "scoring", "weight sync", "generation"}
    assert not any({"optimizer state", "KV cache"} <= names for names in phases.values())
    assert {"parameters", "engine weights", "sync buffers"} <= phases["weight sync"]
    assert "policy, swapped out" in phases["scoring"]


@pytest.mark.parametrize(
    ("placement", "bucket_mb", "on_gpus", "expected"),
    [
        ("colocated", None, True, 1024),
        ("colocated", None, False, 256),
        ("separate", None, True, 256),
        ("colocated", 0.5, True, 0.5),
        ("separate", 64.0, False, 64),
    ],
)
def test_colocated_buckets_are_large(placement: str, bucket_mb: float | None, on_gpus: bool, expected: float) -> None:
    run = planned_run(cluster={"placement": placement}, sync={"bucket_mb": bucket_mb})
    assert run.config.bucket_bytes(on_gpus) == expected * 2**20


def test_host_memory_of_delta_syncs() -> None:
    run = planned_run(rollout={"tensor": 4, "num_engines": 2}, trainer={"parallel": {"data": 8}})
    engine = plan_engine(run)
    model, store = run.dimensions.num_parameters * 2, run.config.cluster.object_store_mb * 2**20
    save = 8 * save_bytes(run, estimate().memory)
    assert host_memory(run, [estimate()], engine, "gloo").total == model * (1 + 8) + save + store
    assert host_memory(run, [estimate()], engine, "nccl").total == save + store


def test_host_memory_of_copies_that_a_run_makes() -> None:
    """Count a save's copies (the state, and the embedding's float32 main weight while it is written), two segments of
    every sender, and offloaded state."""
    layout = {"tensor": 2, "pipeline": 4}
    sections: dict[str, Any] = {"checkpoint": {"async_save": True}, "sync": {"bucket_mb": 4096}}
    run = planned_run(trainer={"parallel": layout}, cluster={"address": "auto", "host_memory_gib": 200}, **sections)
    found = host_memory(run, [estimate(host_optimizer_bytes=8 * GIB)], plan_engine(run), "shared_memory")
    embedding = 151_936 * 5120 / 2 * 4 / GIB
    assert {name: nbytes / GIB for name, nbytes in found.items.items()} == {
        "optimizer state, offloaded": 8 * 8,
        "checkpoint save, asynchronous": 8 * (4 + 6 + 6 + embedding),
        "weight buckets in /dev/shm": 4 * 2 * 4,
    }
    assert not found.fits and replace(found, capacity=None).fits and replace(found, capacity=236 * GIB).fits
    sections["checkpoint"] = {"async_save": False}
    synchronous = planned_run(trainer={"parallel": layout}, cluster={"address": "auto"}, **sections)
    saved = host_memory(synchronous, [estimate()], None, None).items
    assert saved == {"checkpoint save": 8 * embedding * GIB}


@pytest.mark.parametrize(("path", "swapped"), [(None, 0.25), (MODELS / "Qwen3-32B", 0.25), (MODELS / "Qwen3-4B", 4)])
def test_factors_are_swapped_saved_and_sent_instead_of_weights(path: Path | None, swapped: float) -> None:
    """A reference with the same base has no factors, which are all that is swapped for it."""
    sections: dict[str, Any] = {
        "algorithm": {"kl": {"coef": 0.1}},
        "reference": {"path": path},
        "rollout": {"tensor": 8},
    }
    sections |= {"checkpoint": {"async_save": True}, "cluster": {"placement": "colocated"}}
    whole = planned_run(**sections)
    rank, kind = estimate(trained_bytes=GIB // 4), RankKind("all ranks", (0,))
    found = {}
    for sync in ("merged", "adapter"):
        lora = LoraConfig(rank=16, sync=sync)
        config = whole.config.model_copy(update={"model": whole.config.model.model_copy(update={"lora": lora})})
        run = replace(whole, config=config, factors=GIB // 8)
        engine, phases = plan_engine(run), trainer_phases(run, plan_engine(run), kind, rank)
        items = {phase.phase: phase.items for phase in phases}
        assert items["scoring"]["policy, swapped out"] == swapped * GIB
        assert save_bytes(run, rank.memory) == (2 * 0.25 + 0.25 + 6) * GIB
        found[sync] = engine.weight_bytes, items["weight sync"], predict_step(run, [rank], engine, "colocated").sync
    assert found["merged"][2] / found["adapter"][2] == pytest.approx(whole.weight_bytes / (GIB // 4))
    assert found["adapter"][0] - found["merged"][0] == 2 * GIB // 4
    largest = 2 * 5120 * 25_600 * (4 + 4 + 4)
    assert found["merged"][1]["merging of factors"] == largest + GIB and "merging of factors" not in found["adapter"][1]


def test_step_of_known_size() -> None:
    """The step has 4 micro-batches and 1 idle slot of 4 TFLOP and 1 TFLOP of attention."""
    run = planned_run(**EIGHT_LONG_SAMPLES, trainer={"parallel": {"pipeline": 2}})
    assert (run.workload.samples, run.workload.micro_batches, run.workload.filled) == (8, 4, 1.0)
    step = predict_step(run, [estimate()], None, None)
    update = 1e9 / (50e9 * 0.8) + ACROSS_S + (12 + 8) * GIB / (3350e9 * 0.6)
    assert step.training == pytest.approx(5 * ONE_PASS_S + update)
    assert (step.generation, step.scoring, step.sync) == (0, 0, 0)
    # The update's message overlaps with a pass.
    trainer = {"parallel": {"pipeline": 2}, "optimizer": {"overlap": True}}
    overlapped = predict_step(planned_run(**EIGHT_LONG_SAMPLES, trainer=trainer), [estimate()], None, None)
    assert step.training - overlapped.training == pytest.approx(1e9 / (50e9 * 0.8) + ACROSS_S)


@pytest.mark.parametrize(
    ("ranks", "pattern", "expected"),
    [
        (range(8), "gather", 1e9 / 450e9),
        (range(16), "gather", 1e9 / (8 * 50e9)),  # a ring through eight cards
        (range(0, 64, 4), "all_reduce", 1e9 / (2 * 50e9)),  # two ranks per node
        ((0, 8), "gather", 1e9 / 50e9),
        (range(64), "gather", 1e9 / (8 * 50e9)),  # cards are slower than NVLink
        (range(16), "all_to_all", 1e9 * (8 / 15) / 50e9),  # eight of 15 peers are on the other node
        ((7, 8), "message", 1e9 / 50e9),
        ((6, 7), "message", 1e9 / 450e9),
    ],
)
def test_a_group_uses_a_network_card_per_rank_of_a_node(ranks: Any, pattern: Any, expected: float) -> None:
    hardware = Hardware.of(config().cluster)
    assert hardware.link_seconds(1e9, ranks, pattern, calls=0) == pytest.approx(expected / 0.8)


def test_latency_of_collectives() -> None:
    """NCCL's rings have as many hops as ranks less one, twice for all-reduces; hops between nodes take longer."""
    hardware = Hardware.of(config().cluster)
    assert hardware.link_seconds(0, range(8), "gather", 3) == pytest.approx(3 * (8.4e-6 + 7 * 3.4e-6))
    assert hardware.link_seconds(0, range(16), "all_reduce") == pytest.approx(8.4e-6 + 26 * 3.4e-6 + 4 * 14e-6)
    assert hardware.link_seconds(0, range(16), "all_to_all") == pytest.approx(8.4e-6 + 14e-6)


def test_kernels_of_a_pass_wait_for_the_host() -> None:
    run = planned_run(**EIGHT_LONG_SAMPLES)
    for kernels, expected in ((10, ONE_PASS_S), (10**6, 4.0)):  # 4 microseconds each
        work = replace(estimate().training, kernels=kernels)
        assert pass_seconds(run, replace(estimate(), training=work), work) == pytest.approx(expected)
    grouped = replace(estimate().training, grouped_flops=1e12)
    found = pass_seconds(run, estimate(), grouped)
    assert found == pytest.approx(ONE_PASS_S + 1e12 / (790e12 * 0.7))


def test_weights_of_fsdp_arrive_during_the_pass() -> None:
    run = planned_run(**EIGHT_LONG_SAMPLES, trainer={"backend": "fsdp"})
    computing = 4e12 / (790e12 * 0.8) + max(1e12 / (790e12 * 0.63), CONTEXT_S)
    for nbytes, expected in ((10**6, computing), (10**11, 1e11 / (450e9 * 0.8) + IN_NODE_S)):
        context = estimate().training.traffic[1]
        work = replace(estimate().training, traffic=(context, Traffic("data", (0, 7), nbytes, 1)))
        assert pass_seconds(run, estimate(), work) == pytest.approx(expected)


def test_products_in_fp8_are_faster() -> None:
    """Not the head's: 5e12 operations are 4e12 in layers, of which three quarters are in FP8."""
    run = planned_run(**EIGHT_LONG_SAMPLES)
    plain, rounded = (Work(5e12, 0.0, head_flops=1e12, fp8_share=share) for share in (0.0, 0.75))
    saved = pass_seconds(run, estimate(), plain) - pass_seconds(run, estimate(), rounded)
    assert saved == pytest.approx(3e12 / (790e12 * 0.8) - 3e12 / (2 * 790e12 * 0.65))
    fp8: dict[str, Any] = {"trainer": {"fp8": "current"}, "algorithm": {"importance": {"correction": "truncate"}}}
    assert not list(checks.gpu_problems(config(**fp8)))
    (problem,) = checks.gpu_problems(config(**fp8, cluster={"gpu": "a100-80gb"}))
    assert problem.startswith("trainer.fp8=current")


def test_an_unmeasured_ceiling_is_assumed() -> None:
    assert Hardware.of(config().cluster).gpu.ceiling_tflops == Hardware.of(config().cluster).gpu.measured_tflops == 790
    other = Hardware.of(config(cluster={"gpu": "a100-80gb"}).cluster).gpu
    assert other.measured_tflops is None and other.ceiling_tflops == pytest.approx(0.8 * 312)


def test_collectives_overlap_with_products_of_layers() -> None:
    """Products and collectives are visible, except for a part of the collectives. The head's products overlap with
    none."""
    run = planned_run(**EIGHT_LONG_SAMPLES)
    rate, link, kernels = 790e12 * 0.8, 450e9 * 0.8, 7e9 * 0.5 / (3350e9 * 0.6)
    attention = 1e12 / (790e12 * 0.63)
    for hidden, covered, visible in ((10**9, 4e12 / rate, 0.9), (9 * 10**9, 9e9 / link, 1.0)):
        sent = Traffic("tensor", (0, 7), 10 * 10**9, 5, hidden_bytes=hidden)
        forward = Work(5e12, 1e12, (sent,), kernel_bytes=7e9, head_flops=1e12)
        expected = covered + 1e12 / rate + attention + kernels + (10e9 - hidden) / link + 5 * IN_NODE_S * visible
        assert pass_seconds(run, replace(estimate(), forward=forward), forward) == pytest.approx(expected)


def test_more_memory_bandwidth_means_faster_decoding() -> None:
    seconds = []
    for gpu in ("h100-80gb", "h200-141gb"):
        run = planned_run(rollout={"tensor": 4}, cluster={"gpu": gpu})
        found = predict_generation(run, replace(plan_engine(run), at_once=8))
        seconds.append(found.token.weights + found.token.cache)
        # Each of 64 layers has two all-reduces: 20 us, and 3/4 of twice 8 hidden states of 5,120 numbers.
        assert found.token.messages == pytest.approx(128 * (20e-6 + 2 * 3 / 4 * 8 * 5120 * 2 / (450e9 * 0.8)))
        assert found.token.seconds == pytest.approx(seconds[-1] + found.token.messages + 1e-3)
    assert seconds[0] / seconds[1] == pytest.approx(4800 / 3350, rel=0.01)


def test_offloaded_state_is_updated_on_the_host() -> None:
    """Half of 16 GiB crosses the link to the host: gradients there, weights back. Two ranks read all of the state and
    write everything except gradients at the same time."""
    run = planned_run(**EIGHT_LONG_SAMPLES, trainer={"parallel": {"tensor": 2}})
    seconds = []
    for size in (0, 16 * GIB):
        work = estimate(host_optimizer_bytes=size)
        seconds.append(predict_step(run, [work], None, None).training)
    assert seconds[1] - seconds[0] == pytest.approx(8 * GIB / (50e9 * 0.8) + 2 * 28 * GIB / 200e9)


def test_fsdp_moves_offloaded_weights_in_every_pass() -> None:
    """Once, 4 GiB of float32 weights move for forward and for backward, and as many gradients, which takes longer than
    the pass. Then weights are kept and gradients are summed once per window, so one move remains."""
    seconds = []
    for args in ({"accumulate": "sharded"}, {"reshard_after_forward": False}):
        trainer = {"backend": "fsdp", "fsdp": args, "optimizer": {"offload": True}}
        run = planned_run(**EIGHT_LONG_SAMPLES, trainer=trainer)
        work = estimate(host_optimizer_bytes=16 * GIB)
        seconds.append(predict_step(run, [work], None, None).training)
    once = 4 * GIB / (50e9 * 0.8)
    assert once > ONE_PASS_S
    assert seconds[0] - seconds[1] == pytest.approx(run.workload.micro_batches * 2 * once)


@pytest.mark.parametrize(("name", "copies"), [("vllm", 0), ("transformers", 1)])
def test_colocated_state_moves_at_the_link_s_rate(name: str, copies: int) -> None:
    """Weights and optimizer state of the trainer, and weights that an engine keeps, move out and back."""
    layout: dict[str, Any] = {"rollout": {"engine": name, "tensor": 4}, "trainer": {"parallel": {"tensor": 4}}}
    run = planned_run(cluster={"placement": "colocated"}, **layout)
    engine = plan_engine(run)
    moving = predict_step(run, [estimate()], engine, "gloo").moving
    assert moving == pytest.approx(2 * (4 * GIB + 6 * GIB + copies * engine.weight_bytes) / (50e9 * 0.8))


def _sampled(lengths: Lengths, at_once: int = 64, **rollout: Any) -> tuple[PlannedRun, Any]:
    """Plan the sampling of 64 sequences on one engine, in tokens of constant time."""
    sections = {"prompts_per_step": 8, "samples_per_prompt": 8, "max_new_tokens": 8192, "tensor": 8} | rollout
    correction = {"importance": {"correction": "truncate"}} if "max_staleness" in rollout else {}
    run = PlannedRun.of(config(rollout=sections, algorithm=correction), 1, lengths)
    return run, predict_generation(run, replace(plan_engine(run), at_once=at_once, kv_bytes_per_token=0))


def test_the_longest_response_decides() -> None:
    """63 responses of 100 tokens share 100 steps; the last one of 8,000 tokens decodes the other 7,900 by itself."""
    run, found = _sampled(Lengths.of([100] * 63 + [8000]))
    engine = plan_engine(run)
    full, single = (token_time(run, replace(engine, kv_bytes_per_token=0), n, 0).seconds for n in (64, 1))
    assert found.longest == 8000
    assert found.seconds - found.prefill == pytest.approx(100 * full + 7900 * single)
    assert found.tail == pytest.approx(7900 * single)
    # With staleness, others fill the batch: 64 responses of 223.4 tokens on average; only the longest may delay a step.
    _, stale = _sampled(Lengths.of([100] * 63 + [8000]), max_staleness=1)
    assert stale.seconds - stale.prefill == pytest.approx(max(14_300 / 64, 8000 / 2) * full) and stale.tail == 0
    # Of 128 started responses, the first 64 that are finished suffice.
    _, more = _sampled(Lengths.of([100] * 63 + [8000]), at_once=128, oversample=2.0)
    assert more.seconds - more.prefill == pytest.approx(100 * more.token.seconds) and more.sequences == 128


def test_fewer_slots_than_sequences_are_refilled() -> None:
    """Two slots decode responses of 10 and 20 tokens, each of them 8 times: 240 tokens in 120 steps of a full batch."""
    run = PlannedRun.of(
        config(rollout={"prompts_per_step": 2, "samples_per_prompt": 8, "tensor": 8}), 1, Lengths.of([10, 20])
    )
    engine = replace(plan_engine(run), at_once=2, kv_bytes_per_token=0)
    found, token = predict_generation(run, engine), token_time(run, engine, 2, 0).seconds
    assert 120 * token <= found.seconds - found.prefill <= 130 * token


def test_lengths_of_a_cut_exponential_distribution() -> None:
    """Its mean and second moment equal those of drawn samples, and its quantiles those of the exponential one."""
    lengths = Lengths(1000, 4096)
    scale = next(s for s in np.arange(1000, 1200, 0.1) if s * (1 - math.exp(-4096 / s)) >= 1000)
    drawn = np.minimum(4096, np.random.default_rng(0).exponential(scale, 2_000_000))
    assert drawn.mean() == pytest.approx(1000, rel=0.005) and (drawn**2).mean() == pytest.approx(
        lengths.square, rel=0.01
    )
    assert lengths.spread(2)[0] == pytest.approx(-scale * math.log(0.75), rel=1e-3) and lengths.spread(2048)[-1] == 4096
    assert Lengths(4096, 4096).spread(3) == [4096] * 3 and Lengths(4096, 4096).square == 4096**2
    assert Lengths.of([3, 1, 2]).spread(3) == [1, 2, 3] and Lengths.of([3, 1, 2]).square == pytest.approx(14 / 3)


def test_lengths_are_read_from_a_file_or_a_run(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("7\n3\n20\n")
    assert read_lengths(file) == Lengths(10, 20, (3, 7, 20))
    names = "rollout/response_length_mean", "rollout/response_length_max"
    rows = [{"step": step, names[0]: mean, names[1]: most} for step, mean, most in ((1, 100, 900), (2, 300, 700))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_lengths(tmp_path) == Lengths(200, 900)
    for text in ("", "3\n0\n", "3\nx\n"):
        file.write_text(text)
        with pytest.raises(ConfigError) as raised:
            read_lengths(file)
        assert raised.value.code == "lengths-unreadable"


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"cluster": {"nodes": 1}, "trainer": {"parallel": {"data": 8}}}, "use 2 nodes"),
        ({"trainer": {"parallel": {"tensor": 8}}, "cluster": {"gpus_per_node": 4}}, "trainer.parallel.tensor=8 does"),
        ({"cluster": {"nodes": 1, "placement": "colocated"}, "trainer": {"parallel": {"data": 8}}}, ""),
        ({"rollout": {"tensor": 3}}, "rollout.tensor=3 does not divide cluster.gpus_per_node=8"),
        ({"rollout": {"tensor": 3, "pipeline": 2}}, "rollout.tensor * rollout.pipeline=6 does not divide"),
        ({"rollout": {"tensor": 8, "pipeline": 2}}, ""),
        (
            {"reference": {"placement": "workers", "parallel": {"tensor": 3}}, "algorithm": {"kl": {"coef": 0.01}}},
            "reference.parallel.tensor=3 does not divide cluster.gpus_per_node=8",
        ),
    ],
)
def test_placement_is_checked(sections: dict[str, Any], expected: str) -> None:
    problems = list(checks.placement_problems(config(**sections)))
    assert len(problems) == bool(expected) and all(expected in problem for problem in problems)


@pytest.mark.parametrize(("number", "notes"), [(1, 1), (2, 0)])
def test_gpus_without_an_engine_are_noted(number: int, notes: int) -> None:
    trainer = {"parallel": {"data": 8}}
    run = config(cluster={"placement": "colocated"}, rollout={"tensor": 4, "num_engines": number}, trainer=trainer)
    assert len(list(checks.idle_engine_notes(run))) == notes


def test_headers_are_compared_by_name_and_shape(tmp_path: Path) -> None:
    save_file({"a": np.ones((2, 3), np.float32), "extra": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    problems = list(checks.tensor_problems(tmp_path, {"a": (3, 2), "b": (1,)}))
    assert len(problems) == 3
    for names in ("(b)", "(extra)", "(a is [2, 3], should be [3, 2])"):
        assert sum(names in problem for problem in problems) == 1, names


@pytest.mark.parametrize(("dtype", "kept", "exported"), [("float32", 16, 4), ("bfloat16", 14, 2)])
def test_disk_of_a_run(tmp_path: Path, dtype: str, kept: int, exported: int) -> None:
    """A checkpoint of SmolLM2-135M (134,515,008 parameters) took 2,153,947,633 bytes in float32, else 1,884,919,318."""
    trained = ModelDimensions.from_checkpoint(MODELS / "Qwen3-4B").num_parameters
    for every, milestones in ((0, 0), (20, 5)):
        keep = {"keep": 3, "keep_every": every}
        config = RunConfig(run_dir=tmp_path, model={"path": tmp_path, "dtype": dtype}, checkpoint=keep)
        needed = PUBLISHED["Qwen3-4B"] * ((4 + milestones) * kept + exported)
        assert checks.disk_bytes(config.checkpoint, dtype, trained, steps=119) == needed


def test_gradients_of_a_window_exist_only_in_training() -> None:
    run = planned_run(algorithm={"kl": {"coef": 0.1}}, reference={"placement": "trainer"})
    phases = trainer_phases(run, None, RankKind("all ranks", (0,)), estimate(window_gradient_bytes=5 * GIB))
    gradients = {phase.phase: phase.items["gradients"] for phase in phases}
    assert gradients == {"training": 13 * GIB, "scoring": 8 * GIB}


SHARED: dict[str, Any] = {
    "data": {"max_prompt_tokens": 256},
    "rollout": {"prompts_per_step": 6, "samples_per_prompt": 8, "max_new_tokens": 64},
}


def test_a_shared_prompt_is_computed_once_for_its_samples() -> None:
    trainer = {"share_prefixes": "prompts", "target_tokens_per_batch": 2000}
    workload = planned_run(**SHARED, trainer=trainer).workload
    # A group takes 256 + 8 * 64 = 768 tokens, and a micro-batch holds two groups.
    assert (workload.sharing, workload.per_micro_batch, workload.micro_batches) == (8, 16, 3)
    assert workload.filled == pytest.approx(1536 / 2000) and workload.tokens == 6 * 768
    # Tokens attended to: half of the prompt's square, and per response the prompt and half of the response's square.
    seen = 256**2 / 2 + 8 * (64 * 256 + 64**2 / 2)
    assert workload.attention_length == pytest.approx(2 * seen / 768)
    copied = planned_run(**SHARED, trainer={"target_tokens_per_batch": 2000}).workload
    assert (copied.sharing, copied.per_micro_batch, copied.tokens) == (1, 6, 6 * 8 * 320)
    assert copied.attention_length == copied.mean_length == 320


@pytest.mark.parametrize(
    ("prompt", "trainer", "expected"),
    [
        (256, {"share_prefixes": "prompts", "target_tokens_per_batch": 512}, (4, 4, 12)),  # the budget splits the group
        (8, {"share_prefixes": "tree"}, (1, 8192 // 72, 1)),  # copying a short prompt is cheaper
    ],
)
def test_prompts_are_shared_if_they_fit_and_it_pays(
    prompt: int, trainer: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    workload = planned_run(**SHARED | {"data": {"max_prompt_tokens": prompt}}, trainer=trainer).workload
    assert (workload.sharing, workload.per_micro_batch, workload.micro_batches) == expected
