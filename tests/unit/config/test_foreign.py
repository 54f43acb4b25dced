"""Settings of verl and slime: what they become, what is left to decide, and that the result is a configuration."""

import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime_like.commands.import_config import imported_config
from slime_like.config.foreign.imported import Imported
from slime_like.config.reading.fields import UNDECIDED
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError
from tests.support.rejections import Rejects

SLIME = r"""#!/bin/bash
DIR="$(cd -- "$(dirname -- "$0")" && pwd)"
source "$DIR/models/some.sh"
LR=2e-6
CKPT_ARGS=(
   --hf-checkpoint /models/Some-4B
   #--hf-checkpoint /models/Another  # not this one
   --ref-load /models/Some-4B_torch_dist
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data /data/math.jsonl
   --input-key question
   --label-key label
   --rm-type math
   --num-rollout 300
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 4096
   --rollout-temperature 0.8
   --global-batch-size 128
   --eval-prompt-data aime /data/aime.jsonl amc /data/amc.jsonl
   --eval-top-p 0.7
   --rollout-stop-token-ids 151643 151645
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
   --tensor-model-parallel-size 2
   --context-parallel-size 2
   --max-tokens-per-gpu 4096
   --advantage-estimator gspo
   --use-kl-loss
   --kl-loss-coef 0.01
   --kl-loss-type low_var_kl
   --eps-clip 3e-4
   --eps-clip-high 4e-4
   --use-tis
   --lr ${LR}
   --adam-beta2 0.98
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
   --sglang-cuda-graph-bs 1 2 $(seq 4 4 64)
   --attention-dropout 0.0
)
ray start --head --node-ip-address ${MASTER_ADDR} --num-gpus 8 --disable-usage-stats
ray job submit --address="http://127.0.0.1:8265" -- python3 train.py \
   --actor-num-nodes 2 --actor-num-gpus-per-node 8 --colocate \
   ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]}
"""
OF_SLIME: dict[str, Any] = {
    "model.path": Path("/models/Some-4B"), "checkpoint.every": 20, "data.train": (Path("/data/math.jsonl"),),
    "data.prompt_key": "question", "data.answer_key": "label", "data.apply_chat_template": False, "data.shuffle": False,
    "steps": 300, "rollout.prompts_per_step": 32, "rollout.samples_per_prompt": 8, "rollout.max_new_tokens": 4096,
    "rollout.temperature": 0.8, "algorithm.minibatches": 2, "trainer.parallel.tensor": 2, "trainer.parallel.context": 2,
    "trainer.parallel.data": 4, "trainer.target_tokens_per_batch": 8192, "algorithm.loss": "gspo",
    "algorithm.advantage": "grpo", "algorithm.reduction": "samples", "algorithm.kl_coef": 0.01,
    "algorithm.kl_estimator": "low_var_kl", "algorithm.clip_low": 3e-4, "algorithm.clip_high": 4e-4,
    "algorithm.importance_correction": "truncate", "algorithm.importance_high": 2.0, "trainer.optimizer.lr": 2e-6,
    "trainer.optimizer.beta2": 0.98, "trainer.optimizer.weight_decay": 0.01, "trainer.optimizer.decay": "linear",
    "rollout.engine": "sglang", "rollout.tensor": 2, "rollout.num_engines": 8, "cluster.placement": "colocated",
    "cluster.nodes": 2, "evaluation.files": (Path("/data/aime.jsonl"), Path("/data/amc.jsonl")),
    "rollout.engine_args": {"mem_fraction_static": 0.7}, "rollout.drop_zero_spread": True,
    "evaluation.temperature": 0.8, "rollout.stop_token_ids": (151643, 151645),
}  # fmt: skip

VERL = r"""set -x
train_files="['/data/a.parquet', '/data/b.parquet']"
python3 -m verl.trainer.main_ppo --config-name=ppo_trainer \
    algorithm.adv_estimator=grpo \
    algorithm.norm_adv_by_std_in_grpo=False \
    data.train_files="$train_files" \
    data.val_files=$HOME/test.parquet \
    data.train_batch_size=64 data.max_prompt_length=512 data.max_response_length=1024 \
    actor_rollout_ref.model.path=/models/Some-8B \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.002 algorithm.kl_penalty=kl \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.max_num_batched_tokens=8192 \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7 actor_rollout_ref.rollout.val_kwargs.top_k=-1 \
    +actor_rollout_ref.actor.use_prefix_grouper=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.actor.kl_loss_coef=0.7 \
    algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=3.0 \
    algorithm.rollout_correction.rollout_rs=null algorithm.rollout_correction.rollout_token_veto_threshold=1e-4 \
    reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=256 \
    +reward_model.overlong_buffer.penalty_factor=0.5 \
    algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10 data.gen_batch_size=96 \
    some.other=1 trainer.unheard_of=3 \
    trainer.total_training_steps=200 trainer.save_freq=-1 trainer.test_freq=5 trainer.n_gpus_per_node=4 "$@"
"""
OF_VERL: dict[str, Any] = {
    "model.path": Path("/models/Some-8B"), "data.train": (Path("/data/a.parquet"), Path("/data/b.parquet")),
    "data.answer_key": "reward_model.ground_truth", "rollout.prompts_per_step": 64, "data.max_prompt_tokens": 512,
    "rollout.max_new_tokens": 1024, "algorithm.advantage": "grpo_mean_only", "algorithm.loss": "ppo_clip",
    "algorithm.minibatches": 4, "trainer.target_tokens_per_batch": 16384, "trainer.parallel.context": 2,
    "trainer.parallel.data": 2, "trainer.backend": "fsdp", "algorithm.clip_high": 0.28, "algorithm.dual_clip": 3.0,
    "algorithm.reduction": "samples", "algorithm.kl_coef": 0.0, "algorithm.kl_reward_coef": 0.002,
    "algorithm.kl_reward_estimator": "k1", "rollout.engine": "vllm", "rollout.samples_per_prompt": 5,
    "rollout.tensor": 2, "rollout.num_engines": 2, "trainer.share_prefixes": "prompts",
    "algorithm.importance_correction": "truncate", "algorithm.importance_level": "token",
    "algorithm.importance_high": 3.0, "algorithm.importance_veto": 1e-4,
    "rollout.max_drops_per_step": 10 * 96 - 64,
    "rollout.engine_args": {"gpu_memory_utilization": 0.6, "max_num_batched_tokens": 8192},
    "algorithm.overlong_buffer": 256, "algorithm.overlong_factor": 0.5, "steps": 200,
    "checkpoint.every": 0, "evaluation.every": 5, "cluster.gpus_per_node": 4, "cluster.placement": "colocated",
    "trainer.optimizer.warmup_steps": 10 * 4, "trainer.optimizer.weight_decay": 0.01, "trainer.optimizer.beta2": 0.999,
    "resume": "auto",
}  # fmt: skip

VERL_YAML = """
actor_rollout_ref:
  actor:
    _target_: some.Class
    strategy: megatron
    ppo_mini_batch_size: 8
    policy_loss: {loss_mode: gspo}
    optim: {lr: 1.0e-06, betas: [0.9, 0.95], min_lr_ratio: 0.1, warmup_style: cosine}
    megatron: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}
  rollout:
    name: sglang
    multi_turn: {enable: true}
    tensor_model_parallel_size: 4
    response_length: "${data.max_response_length}"
  model: {path: /models/m, enable_gradient_checkpointing: false}
data: {train_files: /data/a.parquet, train_batch_size: 8}
algorithm:
  adv_estimator: rloo
  rollout_is: true
  rollout_is_threshold: 4.0
  rollout_is_mode: mask
  rollout_correction: {rollout_is: null, rollout_rs: geometric, rollout_rs_threshold: 1.001}
trainer: {total_epochs: 3, nnodes: 1, n_gpus_per_node: 8, resume_mode: auto}
custom_reward_function: {path: mine.py, name: compute_score}
"""
OF_VERL_YAML: dict[str, Any] = {
    "algorithm.loss": "gspo", "algorithm.advantage": "rloo", "trainer.backend": "megatron", "trainer.parallel.data": 2,
    "trainer.parallel.pipeline": 2, "rollout.engine": "sglang", "rollout.num_engines": 2, "rollout.tensor": 4,
    "trainer.optimizer.beta2": 0.95, "trainer.optimizer.decay": "cosine", "trainer.optimizer.min_lr": 1e-7,
    "algorithm.importance_correction": "mask", "algorithm.importance_high": 4.0, "algorithm.importance_low": 0.25,
    "algorithm.minibatches": 1, "trainer.recompute": "none", "data.train": (Path("/data/a.parquet"),),
}  # fmt: skip


VERL_OTHERWISE = """
my: {lr: 3.0e-06}
data: {train_files: ["${oc.env:HOME}/a.parquet", b.parquet], max_response_length: 512}
actor_rollout_ref:
  actor:
    strategy: megatron
    ulysses_sequence_parallel_size: 1
    ppo_max_token_len_per_gpu: 100
    optim: {lr: "${my.lr}", min_lr: 1.0e-07, lr_decay_style: linear}
    megatron:
      context_parallel_size: 2
      sequence_parallel: true
      virtual_pipeline_model_parallel_size: 2
      override_transformer_config: {recompute_granularity: selective}
  rollout:
    name: sglang
    min_p: 0.05
    engine_kwargs: {sglang: {attention_backend: triton}, vllm: {swap_space: 4}}
    multi_turn: {enable: false, max_assistant_turns: 3}
reward:
  reward_kwargs: {overlong_buffer_cfg: {enable: true, len: 64, penalty_factor: 0.5}}
  custom_reward_function: {path: mine.py, name: score}
"""


def test_other_layouts_of_verl_s_settings(tmp_path: Path) -> None:
    """Interpolations of the file's own settings, and names of later versions."""
    imported = _imported(tmp_path, "a.yaml", VERL_OTHERWISE)
    expected = {
        "trainer.optimizer.lr": 3e-6, "trainer.optimizer.min_lr": 1e-7, "trainer.optimizer.decay": "linear",
        "trainer.parallel.context": 2, "trainer.target_tokens_per_batch": 200, "trainer.parallel.data": 4,
        "trainer.parallel.sequence": False, "trainer.parallel.virtual_pipeline": 2, "trainer.recompute": "none",
        "rollout.min_p": 0.05, "rollout.engine_args.attention_backend": "triton", "algorithm.overlong_buffer": 64,
        "algorithm.overlong_factor": 0.5,
    }  # fmt: skip
    assert {name: imported.values[name][0] for name in expected} == expected
    assert "data.train" not in imported.values and "rollout.engine_args.swap_space" not in imported.values
    assert {
        "data.train_files=['${oc.env:HOME}/a.parquet', 'b.parquet']",
        "reward.custom_reward_function.path=mine.py, name=score",
    } <= set(imported.open_points)


def _imported(tmp_path: Path, name: str, content: str) -> Imported:
    path = tmp_path / name
    path.write_text(content)
    return imported_config(path)


@pytest.mark.parametrize(
    ("name", "content", "expected", "to_decide"),
    [
        (
            "run.sh", SLIME, OF_SLIME,
            [
                "--rm-type math", "run_dir", "--eval-top-p 0.7", "--sglang-cuda-graph-bs 1 2 $(command)",
                "data.max_prompt_tokens", "source $DIR/models/some.sh",
            ],
        ),
        (
            "run.sh", VERL, OF_VERL,
            [
                "the reward of each data_source", "run_dir", "data.val_files=$HOME/test.parquet",
                "trainer.unheard_of=3", "some.other=1", "$@",
                "algorithm.filter_groups.enable=True",
                "actor_rollout_ref.rollout.val_kwargs.top_p=0.7",
            ],
        ),
        (
            "ppo.yaml", VERL_YAML, OF_VERL_YAML,
            [
                "custom_reward_function.path=mine.py, name=compute_score", "steps",
                "algorithm.rollout_correction.rollout_rs=geometric (1.001)",
                "actor_rollout_ref.rollout.multi_turn.enable=True", "run_dir",
                "actor_rollout_ref.actor.loss_agg_mode=token-mean", "trainer.target_tokens_per_batch",
                "actor_rollout_ref.rollout.response_length=${data.max_response_length}",
            ],
        ),
    ],
    ids=["slime", "verl", "verl-yaml"],
)  # fmt: skip
def test_what_settings_become(
    tmp_path: Path, name: str, content: str, expected: dict[str, Any], to_decide: list[str]
) -> None:
    imported = _imported(tmp_path, name, content)
    assert sorted([*imported.open_points, *imported.unmatched]) == sorted(to_decide)
    result = tmp_path / "mine.yaml"
    result.write_text(imported.text())
    choice = ["--reward.functions", "[{name: math_verify}]"]
    with pytest.raises(ConfigError) as caught:
        load_config(result, choice, run_dir=tmp_path / "run")
    assert {problem.field for problem in caught.value.problems} == imported.undecided != set()
    defaults = yaml.safe_load(result.read_text().replace(f": {UNDECIDED}", ": # decided by its default"))
    result.write_text(yaml.safe_dump(_without_nothing(defaults)))
    config = load_config(result, choice, run_dir=tmp_path / "run")
    assert {field: attrgetter(field)(config) for field in expected} == expected
    assert all(re.search(rf"^# - {re.escape(point)}(: |$)", imported.text(), re.MULTILINE) for point in to_decide)


def _without_nothing(data: dict[str, Any]) -> dict[str, Any]:
    kept = {key: _without_nothing(value) if isinstance(value, dict) else value for key, value in data.items()}
    return {key: value for key, value in kept.items() if value is not None}


def _settings(script: str) -> list[str]:
    """Names of the settings that the script gives, by a reading of its text alone."""
    text = re.sub(r"^\s*#.*", "", script, flags=re.MULTILINE)
    if "algorithm.adv_estimator" in text:
        return re.findall(r"(?<![\w.])[a-z_]+(?:\.\w+)+(?==)", text)
    return [name for name in re.findall(r"--[a-z][a-z0-9-]*", text) if name not in RAY]


RAY = {"--head", "--node-ip-address", "--num-gpus", "--disable-usage-stats", "--address"}


@pytest.mark.parametrize("script", [SLIME, VERL], ids=["slime", "verl"])
def test_every_setting_is_in_what_is_printed(tmp_path: Path, script: str) -> None:
    settings = _settings(script)
    assert len(settings) > 25
    printed = _imported(tmp_path, "run.sh", script).text()
    assert [name for name in settings if not re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", printed)] == []


@pytest.mark.parametrize("script", [SLIME, VERL], ids=["slime", "verl"])
def test_what_is_known_only_when_the_script_runs_changes_no_value(tmp_path: Path, script: str) -> None:
    """Whatever depends on a setting, also as one of several, is left out with it."""
    known, tried = _imported(tmp_path, "run.sh", script).values, 0
    for name in _settings(script):
        pattern = re.compile(rf"(?<![\w.-]){re.escape(name)}[= ](?!-|$)(\"[^\"]*\"|[^\s\\]+)", re.MULTILINE)
        if (match := pattern.search(script)) is None:
            continue
        tried += 1
        changed = script[: match.start(1)] + "$(choose)" + script[match.end(1) :]
        imported = _imported(tmp_path, "run.sh", changed)
        other = {field: value for field, (value, _) in imported.values.items() if value != known[field][0]}
        assert other == {}, name
        points = [*imported.open_points, *imported.unmatched, *imported.needless]
        assert any(name in point and "$(command)" in point for point in points), name
    assert tried > 25


DAPO = r"""
project='DAPO test'
prompt_length=$((1024 * 2))
NNODES=${NNODES:-2}
HOME_OF=${HOME_OF:-"${SCRATCH}/verl"}
MODEL=${MODEL:-"${HOME_OF}/models/${project}"}
OUT=${OUT:="/out/$project"}
python3 -m recipe.dapo.main_dapo data.train_batch_size=64 data.max_prompt_length=${prompt_length} \
    data.max_response_length=$(( prompt_length*(3 + 7) / 2 )) data.gen_batch_size=$((64 * $NNODES)) \
    actor_rollout_ref.model.path="${MODEL}" trainer.nnodes="${NNODES}" trainer.default_local_dir="${OUT}" \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 actor_rollout_ref.actor.ppo_mini_batch_size=$((1 << 4)) \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
"""


def test_defaults_and_arithmetic_of_a_shell(tmp_path: Path) -> None:
    imported = _imported(tmp_path, "run.sh", DAPO)
    values = {name: value for name, (value, _) in imported.values.items()}
    assert (values["data.max_prompt_tokens"], values["rollout.max_new_tokens"]) == (2048, 10240)
    assert (values["cluster.nodes"], values["run_dir"]) == (2, "/out/DAPO test")
    assert {
        "actor_rollout_ref.model.path=${SCRATCH}/verl/models/DAPO test", "actor_rollout_ref.rollout.name",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.8", "trainer.optimizer.warmup_steps",
        "actor_rollout_ref.actor.ppo_mini_batch_size=$((1<<4))", "algorithm.minibatches",
    } <= imported.open_points.keys()  # fmt: skip
    assert "data.gen_batch_size=128" in imported.needless and "model.path" not in values


@pytest.mark.parametrize(
    "before",
    [
        'if [ -n "$DEBUG" ]; then\n  LR=2\nfi', "[ -z $X ] && LR=2", "[ -z $X ] || LR=2", "setup() {\n LR=2\n}",
        "for LR in 2 3; do true; done", "case $MODE in\n a) LR=2;;\n b) LR=3;;\nesac", "while read LR; do :; done",
        "read LR", "LR=$(choose)", 'eval "LR=2"', "let LR=2", "printf -v LR %s 2", "((LR++))", "LR={1,2}",
        "LR=`choose`", "if a; then LR=2; else LR=3; fi", "(LR=2)", "unset LR", 'LR="$OTHER"',
    ],
)  # fmt: skip
def test_what_a_script_may_not_assign_is_not_known(tmp_path: Path, before: str) -> None:
    script = f'LR=1\n{before}\npython3 train.py --prompt-data d --lr "$LR" --seed 3\n'
    imported = _imported(tmp_path, "run.sh", script)
    assert "trainer.optimizer.lr" not in imported.values and imported.values["seed"][0] == 3
    assert any(point.startswith("--lr ") for point in imported.open_points)


@pytest.mark.parametrize("added", ["if a; then ARGS+=(--lr 2); fi", "a && ARGS=(--seed 4)", "a || ARGS+=(--seed 3)"])
def test_an_array_that_a_branch_changes(tmp_path: Path, added: str) -> None:
    script = f"ARGS=(--seed 3 --lr 1)\n{added}\npython3 train.py --prompt-data d ${{ARGS[@]}}\n"
    values = {name: value for name, (value, _) in _imported(tmp_path, "run.sh", script).values.items()}
    assert (values.get("seed", 3), values.get("trainer.optimizer.lr", 1)) == (3, 1)
    assert len(values.keys() & {"seed", "trainer.optimizer.lr"}) < 2


def test_of_a_script_the_trainer_s_command_alone_counts(tmp_path: Path) -> None:
    script = """
CKPT=(--hf-checkpoint /mine) OTHER=(--lr 5)
python tools/convert.py --hf-checkpoint /another
ray job submit --runtime-env-json='{"a": 1}' -- python3 train_async.py --prompt-data d ${CKPT[@]} > log 2>&1
python3 eval.py --lr 5
"""
    imported = _imported(tmp_path, "run.sh", script)
    values = {name: value for name, (value, _) in imported.values.items()}
    assert values["model.path"] == "/mine" and values["rollout.max_staleness"] == 1
    assert "trainer.optimizer.lr" not in values and "${OTHER[@]}" in imported.needless


def test_hostile_scripts_end_soon(tmp_path: Path) -> None:
    bomb = "X0=" + "a" * 50 + "".join(f"\nX{n + 1}={f'$X{n}' * 50}" for n in range(9))
    deep = "${A:-" * 5_000 + "1" + "}" * 5_000
    for lr in (f"{bomb}\nLR=$X9", f"LR={deep}", "LR=" + "$(" * 9_000, "LR=$((" + "(" * 9_000, 'LR="${' * 9_000):
        script = 'python train.py --prompt-data d --seed 3 --lr "$LR"\n'
        for content in (f"{script}{lr}\n", f"{lr}\n{script}"):
            try:
                imported = _imported(tmp_path, "run.sh", content)
            except ConfigError:
                continue  # what is not closed takes the rest
            assert "trainer.optimizer.lr" not in imported.values and imported.values["seed"][0] == 3


@pytest.mark.parametrize(
    ("given", "values", "points"),
    [
        ("--kl-coef 0.1", {"algorithm.kl_reward_coef": None}, []),  # slime's GRPO takes the reward alone
        (
            "--kl-coef 0.1 --kl-loss-type k2 --advantage-estimator reinforce_plus_plus --normalize-advantages",
            {
                "algorithm.kl_reward_coef": 0.1, "algorithm.kl_reward_estimator": "k2",
                "algorithm.advantage": "reinforce_pp",
            },
            [],
        ),
        (
            "--advantage-estimator reinforce_plus_plus", {"algorithm.advantage": None},
            ["--advantage-estimator reinforce_plus_plus, without --normalize-advantages"],
        ),
        (
            "--train-backend fsdp --gradient-checkpointing",
            {"trainer.backend": "fsdp", "trainer.recompute": "full", "trainer.optimizer.beta2": None}, [],
        ),
        ('--lr 2 $EXTRA --seed 3 "$@"', {"trainer.optimizer.lr": 2.0, "seed": 3}, ["$EXTRA", "$@"]),
        ('--eps-clip 0.3 $EXTRA --use-tis "$@"', {"algorithm.clip_low": 0.3}, ["$EXTRA", "$@"]),
        (
            "--rollout-batch-size 8 --global-batch-size 8 --loss-type sft_loss --actor-num-gpus-per-node 4",
            {
                "algorithm.loss": "sft", "algorithm.advantage": None, "rollout.engine": None, "rollout.tensor": None,
                "algorithm.minibatches": 1, "cluster.nodes": 1, "cluster.gpus_per_node": 4, "reward.functions": None,
                "data.messages_key": "input", "data.prompt_key": None, "data.apply_chat_template": None,
            },
            [],
        ),
        (
            "--rollout-batch-size 8 --global-batch-size 8",
            {
                "rollout.samples_per_prompt": 1, "seed": 1234, "data.prompt_key": "input", "algorithm.minibatches": 1,
                "trainer.parallel.data": 8, "data.answer_key": None, "rollout.max_new_tokens": None,
            },
            ["data.answer_key", "rollout.max_new_tokens"],
        ),
        ("--eval-prompt-data a /b --eval-top-k 1 --eval-temperature 0.8", {"evaluation.temperature": 0.0}, []),
        ("--use-kl-loss", {"algorithm.kl_coef": 0.0, "algorithm.kl_estimator": "k1"}, []),
        (
            "--use-tis --tis-clip-low 0.5", {"algorithm.importance_correction": None},
            ["--use-tis --tis-clip-low 0.5"],
        ),
        (
            "--disable-rewards-normalization", {"algorithm.advantage": None}, ["--disable-rewards-normalization"],
        ),
        (
            "--custom-config-path a.yaml --rollout-batch-size 8",
            {"rollout.samples_per_prompt": None, "algorithm.loss": None, "rollout.prompts_per_step": 8},
            ["--custom-config-path a.yaml"],
        ),
        (
            "--eval-config a.yaml --eval-prompt-data a /b --lr-warmup-fraction 0.1 --sglang-some 1 2",
            {"evaluation.files": None, "rollout.engine_args.some": None},
            ["--eval-config a.yaml", "--lr-warmup-fraction 0.1", "--sglang-some 1 2"],
        ),
        (
            "--actor-num-gpus-per-node 4 --rollout-num-gpus 4",
            {"cluster.nodes": 1, "cluster.gpus_per_node": 8, "rollout.num_engines": 4}, [],
        ),
        (
            "--actor-num-gpus-per-node 4 --rollout-num-gpus 8 --num-gpus-per-node 4",
            {"cluster.nodes": 3, "cluster.gpus_per_node": 4}, [],
        ),
        ("--sglang-api-key hidden", {"rollout.engine_args.api_key": None}, ["--sglang-api-key ..."]),
    ],
)  # fmt: skip
def test_what_depends_on_other_settings_of_slime(
    tmp_path: Path, given: str, values: dict[str, Any], points: list[str]
) -> None:
    imported = _imported(tmp_path, "run.sh", f"python3 train.py --prompt-data d {given}")
    assert {name: imported.values.get(name, (None,))[0] for name in values} == values
    listed = {*imported.open_points, *imported.unmatched}
    assert set(points) <= listed and "hidden" not in imported.text()


def test_lines_may_end_as_on_windows(tmp_path: Path) -> None:
    imported = _imported(tmp_path, "run.sh", SLIME)
    path = tmp_path / "windows.sh"
    path.write_bytes(SLIME.replace("\n", "\r\n").encode())
    assert imported_config(path).text() == imported.text()


BRANCHES = r"""
GRPO="--eps-clip 0.3 --lr 1e-6"
if [ -n "$KL" ]; then GRPO="$GRPO --use-kl-loss --kl-loss-coef 0.1"; else GRPO+=" --kl-loss-coef 0.2 --lr 2e-6"; fi
NODES=${NODES:-2} SEED=${SEED:-7} GPUS=8
ARGS=()
a && ARGS+=(--seed 4) || ARGS+=(--rollout-temperature 2)
python3 train.py --prompt-data d --seed 3 $GRPO --actor-num-nodes $NODES --actor-num-gpus-per-node $GPUS \
   --num-rollout $SEED ${ARGS[@]} --colocate $(more) ${EXTRA:-} \
   # --rollout-top-k 20 \
   --rollout-top-p 0.5
"""


def test_what_a_branch_adds_is_listed_and_the_rest_is_kept(tmp_path: Path) -> None:
    imported = _imported(tmp_path, "run.sh", BRANCHES)
    values = {name: value for name, (value, _) in imported.values.items()}
    assert (values["algorithm.clip_low"], values["steps"], values["cluster.nodes"]) == (0.3, 7, 2)
    assert not values.keys() & {"seed", "trainer.optimizer.lr", "algorithm.kl_coef", "rollout.top_p"}
    points = imported.open_points
    assert {"--seed 3 or 4", "--rollout-temperature 2", "--lr 1e-6 or 2e-6", "--rollout-top-p 0.5"} <= points.keys()
    assert {"$(command)", "${EXTRA:-}"} <= points.keys()
    assert any("--kl-loss-coef 0.1 or 0.2" in point for point in [*points, *points.values()])


def test_on_what_else_a_value_depends_stands_beside_it(tmp_path: Path) -> None:
    """Variables of whose defaults the script makes use, and arguments that may hold what the script does not."""
    origins = {name: origin for name, (_, origin) in _imported(tmp_path, "run.sh", BRANCHES).values.items()}
    assert "$NODES" in origins["cluster.nodes"] and "$NODES" in origins["trainer.parallel.data"]
    assert "$SEED" in origins["steps"] and "$SEED" not in origins["cluster.nodes"]
    for name in ("trainer.optimizer.weight_decay", "algorithm.reduction", "trainer.parallel.data"):
        assert "$(command)" in origins[name] and "${EXTRA:-}" in origins[name]
    for name in ("cluster.gpus_per_node", "data.train"):
        assert "$" not in origins[name]


@pytest.mark.parametrize("base", ["--config-name=mine", "--config-path /x --config-name=ppo_trainer"])
def test_of_another_base_configuration_nothing_is_assumed(tmp_path: Path, base: str) -> None:
    """Whatever that file sets beside these settings, the values written hold."""
    based = _imported(tmp_path, "run.sh", VERL.replace("--config-name=ppo_trainer", base))
    assert {"algorithm.dual_clip", "rollout.tensor", "trainer.optimizer.weight_decay", "resume"}.isdisjoint(
        based.values
    )
    assert len(based.values) > 20
    others = [
        "actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.use_kl_loss=True", "data.seed=3",
        "actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        "trainer.nnodes=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=4", "actor_rollout_ref.hybrid_engine=False",
        "trainer.resume_mode=disable", "actor_rollout_ref.actor.optim.betas=[0.8,0.9]", "model_engine=megatron",
        "actor_rollout_ref.actor.megatron.context_parallel_size=2", "algorithm.norm_adv_by_std_in_grpo=True",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False", "custom_reward_function.path=a.py",
    ]  # fmt: skip
    for other in others:
        first = VERL.replace("--config-name=ppo_trainer", other)  # what the script sets counts
        values = _imported(tmp_path, "run.sh", first).values
        changed = {field for field, (value, _) in based.values.items() if values.get(field, (None,))[0] != value}
        assert changed == set(), other


def test_a_launch_in_a_function_takes_what_is_assigned_before_the_function_is_called(tmp_path: Path) -> None:
    script = "LR=1\nSEED=3\nrun() {\n python3 train.py --prompt-data d --lr $LR --seed $SEED\n}\nLR=2\nrun\n"
    values = _imported(tmp_path, "run.sh", script).values
    assert "trainer.optimizer.lr" not in values and values["seed"][0] == 3


def test_switches_of_a_branch_are_not_taken_for_given(tmp_path: Path) -> None:
    switches = [
        "--use-tis", "--colocate", "--calculate-per-token-loss", "--apply-chat-template", "--sequence-parallel",
        "--disable-grpo-std-normalization", "--rollout-shuffle", "--gradient-checkpointing", "--use-wandb",
    ]  # fmt: skip
    script = "A=()\nif x; then A+=({}); fi\npython3 train.py --prompt-data d --train-backend fsdp ${{A[@]}}\n"
    none = _imported(tmp_path, "run.sh", script.format("")).values
    for switch in switches:
        imported = _imported(tmp_path, "run.sh", script.format(switch))
        assert {name for name, each in imported.values.items() if each[0] != none.get(name, (None,))[0]} == set()
        given = _imported(tmp_path, "run.sh", f"python3 train.py --prompt-data d --train-backend fsdp {switch}")
        changed = {name for name, each in given.values.items() if each[0] != none.get(name, (None,))[0]}
        assert changed and changed.isdisjoint(imported.values)
        assert any(switch in point for point in [*imported.open_points, *imported.open_points.values()])


@pytest.mark.parametrize(
    ("given", "values"),
    [
        (
            "",
            {
                "rollout.samples_per_prompt": 1, "rollout.prompts_per_step": 1024, "algorithm.minibatches": 4,
                "data.max_prompt_tokens": 512, "rollout.max_new_tokens": 512, "evaluation.temperature": 0.0,
                "trainer.target_tokens_per_batch": None, "trainer.recompute": "full",
            },
        ),
        (
            "{actor}.use_kl_loss=True actor_rollout_ref.ref.model.path=/other",
            {"reference.path": "/other", "algorithm.kl_coef": 0.001, "algorithm.kl_estimator": "low_var_kl"},
        ),
        ("actor_rollout_ref.ref.model.path=/other", {"reference.path": None}),
        (
            "{actor}.fsdp_config.ulysses_sequence_parallel_size=4 {actor}.use_dynamic_bsz=True",
            {
                "trainer.parallel.context": 4, "trainer.parallel.data": 2,
                "trainer.target_tokens_per_batch": 4 * 16384,
            },
        ),
        ("trainer.v1.trainer_mode=separate_async", {"cluster.placement": None, "rollout.num_engines": None}),
        ("{rollout}.nnodes=1", {"cluster.placement": None, "rollout.num_engines": None}),
        ("async_training.staleness_threshold=1", {"cluster.placement": None, "rollout.num_engines": None}),
        ("{rollout}.data_parallel_size=2", {"rollout.num_engines": None, "cluster.placement": "colocated"}),
        ("{rollout}.val_kwargs.do_sample=True", {"evaluation.temperature": 0.0}),
        ("{rollout}.val_kwargs.do_sample=True {rollout}.val_kwargs.temperature=1", {"evaluation.temperature": 1.0}),
        ("{rollout}.val_kwargs.temperature=0.6", {"evaluation.temperature": None}),
        ("algorithm.adv_estimator=rloo_vectorized", {"algorithm.advantage": "rloo"}),
        ("algorithm.adv_estimator=gae", {"algorithm.advantage": None}),
        ("{actor}.policy_loss.loss_mode=cispo", {"algorithm.loss": None, "algorithm.dual_clip": None}),
        ("{actor}.tis_imp_ratio_cap=3", {"algorithm.importance_high": 3.0}),
        ("{actor}.megatron.tensor_model_parallel_size=2", {"trainer.parallel.sequence": True}),
        (
            "algorithm.adv_estimator=reinforce_plus_plus algorithm.use_kl_in_reward=True",
            {"algorithm.advantage": None, "algorithm.kl_reward_coef": 0.001},
        ),
        ("{actor}.optim.min_lr_ratio=0.1", {"trainer.optimizer.min_lr": 1e-7}),
        ("{actor}.grad_clip=0.5", {"trainer.optimizer.clip_grad": 0.5}),
        ("{actor}.grad_clip=0.5 {actor}.optim.clip_grad=1", {"trainer.optimizer.clip_grad": None}),
        ("data.train_batch_size=0", {"rollout.prompts_per_step": None, "algorithm.minibatches": None}),
        ("{actor}.use_kl_loss=True {actor}.kl_loss_type=k3", {"algorithm.kl_estimator": "low_var_kl"}),
        ("data.val_max_samples=7", {"evaluation.max_prompts": 7}),
        ("model.path={{a,b}} actor_rollout_ref.model.path=/m/{{a,b}}", {"model.path": None}),
    ],
)  # fmt: skip
def test_what_verl_s_settings_mean_together(tmp_path: Path, given: str, values: dict[str, Any]) -> None:
    base = "python3 -m verl.trainer.main_ppo {rollout}.name=vllm "
    names = {"actor": "actor_rollout_ref.actor", "rollout": "actor_rollout_ref.rollout"}
    imported = _imported(tmp_path, "run.sh", (base + given).format(**names))
    assert {name: imported.values.get(name, (None,))[0] for name in values} == values
    printed = imported.text()
    given_names = re.findall(r"[\w.]+(?==)", given.format(**names))
    assert [name for name in given_names if name not in printed] == []


def test_a_program_without_settings_of_the_actor_is_verl_s(tmp_path: Path) -> None:
    based = _imported(tmp_path, "run.sh", "python3 -m verl.trainer.main_ppo --config-path=/my --config-name=my_ppo")
    assert based.open_points.keys() >= {"--config-path=/my, --config-name=my_ppo"}
    arrays = _imported(tmp_path, "run.sh", "source a.sh\npython3 -m verl.trainer.main_ppo data.seed=3 ${ARGS[@]} $@")
    assert arrays.values["seed"][0] == 3 and {"source a.sh", "${ARGS[@]}", "$@"} <= arrays.open_points.keys()
    raw = _imported(tmp_path, "a.yaml", "defaults: [{actor@actor_rollout_ref.actor: dp_actor}, _self_]")
    assert "algorithm.loss" not in raw.values


def test_groups_are_left_out_where_the_recipe_does_it(tmp_path: Path) -> None:
    given = "algorithm.filter_groups.enable=True actor_rollout_ref.rollout.n=4"
    for program, value in (("recipe.dapo.main_dapo", True), ("verl.trainer.main_ppo", None)):
        values = _imported(tmp_path, "run.sh", f"python3 -m {program} {given}").values
        assert values.get("rollout.drop_zero_spread", (None,))[0] is value


def test_words_of_a_value_with_an_unknown_part(tmp_path: Path) -> None:
    script = 'S=${X:?need it}\nA="--lr 2 --save-interval ${Y:?no way} --seed 3 --load $S/m"\n'
    imported = _imported(tmp_path, "run.sh", f"{script}python3 train.py --prompt-data d $A --ref-load $S\n")
    values = {name: value for name, (value, _) in imported.values.items()}
    assert (values["trainer.optimizer.lr"], values["seed"]) == (2.0, 3) and "checkpoint.every" not in values
    assert not any(point.endswith("it}") for point in imported.unmatched)


def test_an_empty_default_is_the_user_s_to_fill(tmp_path: Path) -> None:
    script = "N=${N:-}\npython -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=4 trainer.n_gpus_per_node=${N:-8}"
    value, origin = _imported(tmp_path, "run.sh", script).values["cluster.gpus_per_node"]
    assert value == 8 and "$N is not set" in origin


def test_references_that_multiply_end_soon(tmp_path: Path) -> None:
    levels = "".join(f"  l{n + 1}: {' '.join([f'${{a.l{n}}}'] * 8)!r}\n" for n in range(9))
    content = f"a:\n  l0: {'x' * 50}\n  c: ${{a.c}}\n{levels}actor_rollout_ref: {{rollout: {{n: 4}}}}\n"
    assert _imported(tmp_path, "a.yaml", content).values["rollout.samples_per_prompt"][0] == 4


def test_programs_and_engines_of_verl(tmp_path: Path) -> None:
    settings = "model_engine=megatron data.train_batch_size=8 actor_rollout_ref.rollout.name=vllm ~trainer.x -m"
    imported = _imported(tmp_path, "run.sh", f"python3 -m verl.trainer.main_ppo {settings}")
    assert imported.values["trainer.backend"][0] == "megatron"
    assert {"~trainer.x", "-m"} == set(imported.unmatched) and "rollout.tensor" in imported.open_points
    named = settings.replace("model_engine=megatron", "--config-name ppo_megatron_trainer")
    assert _imported(tmp_path, "run.sh", f"python -m verl.trainer.main_ppo {named}").values.keys() == (
        imported.values.keys()
    )
    other = _imported(tmp_path, "run.sh", f"ray job submit -- python3 -m recipe.prime.main_prime {settings}")
    assert "recipe.prime.main_prime" in other.open_points and "cluster.placement" not in other.values
    gspo = f"{settings} actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.clip_ratio_c=4"
    imported = _imported(tmp_path, "run.sh", f"python3 -m verl.trainer.main_ppo {gspo}")
    assert "algorithm.dual_clip" not in imported.values
    assert "actor_rollout_ref.actor.clip_ratio_c=4" in imported.needless


REFERENCES = """
defaults: [ppo_trainer, _self_]
base_dir: /data
its: 3
a: {path: "${base_dir}/a", none: null, b: {up: "${..path}", same: "${.up}", more: [1, "${its}"]}}
data: {train_files: ["${a.path}/t.parquet"], val_files: "${a.b.same}/v.parquet", seed: "${oc.select:its,5}"}
actor_rollout_ref:
  actor: {optim: {lr: "${oc.select:not.there, 1e-5}"}, ppo_epochs: "${oc.select:a.none,4}", nothing: "${actor}"}
  rollout: [1, 2]
"""


def test_references_of_a_yaml_file_are_followed(tmp_path: Path) -> None:
    imported = _imported(tmp_path, "a.yaml", REFERENCES)
    values = {name: value for name, (value, _) in imported.values.items()}
    assert values["data.train"] == ["/data/a/t.parquet"] and values["evaluation.files"] == ["/data/a/v.parquet"]
    assert (values["seed"], values["trainer.optimizer.lr"]) == (3, 1e-5) and "algorithm.epochs" not in values
    points = [*imported.open_points, *imported.unmatched]
    assert {"base_dir=/data", "its=3", "actor_rollout_ref.rollout=[1, 2]", "a.b.more=[1, 3]"} <= set(points)
    assert "actor_rollout_ref.actor.nothing=${actor}" in points and not any("defaults" in point for point in points)
    based = _imported(tmp_path, "b.yaml", REFERENCES.replace("ppo_trainer", "mine"))
    assert "defaults: mine" in based.open_points and "algorithm.dual_clip" not in based.values


@pytest.mark.parametrize(
    "given",
    [
        "--rm-url 'Bearer 0123456789abcdef'", "--note hf_abcdefghijklmnopqrstuvwxyz0123456789",
        "--note sk-abcdefghijklmnopqrstuvwxyz0123456789", "--hf-checkpoint https://me:abcdef@host/x",
        "--hf-checkpoint 'https://h/x?X-Amz-Signature=abcdef0123'", "--sglang-x 'token=abcdef'",
        "--dynamic-sampling-filter-path https://u:abcdef@h/x", "--kl-loss-type https://u:abcdef@h --use-kl-loss",
        "--lr https://u:abcdef@h", "--lr-decay-style api_keys=abcdef", "--note pwd=abcdef$X",
        "--note github_pat_abcdef0123456789",
        r"""--train-env-vars '{"a": "{\"api_key\": \"abcdef\"}"}'""", "--note 'Authorization: Token abcdef'",
        "--note https://u:abc/abcdef@h/x", "--seed 1\n--password abcdef",
    ],
)  # fmt: skip
def test_no_value_with_a_credential_is_taken_over(tmp_path: Path, given: str) -> None:
    imported = _imported(tmp_path, "run.sh", f"python train.py --prompt-data d {given}")
    printed = imported.text()
    assert given.split()[0] in printed and "abcdef" not in printed and "model.path" not in imported.values


def test_no_credential_is_printed(tmp_path: Path) -> None:
    script = "KEY=sk-1\npython train.py --hf-checkpoint m --prompt-data d --rollout-batch-size 4 --wandb-key ${KEY}"
    printed = _imported(tmp_path, "run.sh", script).text()
    assert "--wandb-key ..." in printed and "sk-1" not in printed


@pytest.mark.parametrize(
    "given",
    [
        "--openai-key hidden", "--custom-secret-key hidden", "--passwd hidden", "--wandb-host https://me:hidden@host",
        "--rm-url http://me:hid@den@host/x", """--env '{"WANDB_API_KEY": "hidden", "a": 1}'""", "--env A_TOKEN=hidden",
    ],
)  # fmt: skip
def test_no_credential_inside_of_a_value_is_printed(tmp_path: Path, given: str) -> None:
    base = "wandb login hidden\nexport WANDB_API_KEY=hidden\npython train_async.py --prompt-data d "
    printed = _imported(tmp_path, "run.sh", base + given).text()
    assert given.split()[0] in printed and "hid" not in printed


@pytest.mark.parametrize(
    "text", ["a\nreward: {functions: []}\nb", "a\x1b[2Jb", "a # b", "a: b\t", "'\"", "\u2028x: 1", "e\u0301"]
)
def test_no_value_becomes_another_setting(tmp_path: Path, text: str) -> None:
    yaml_file = {"actor_rollout_ref": {"model": {"path": text}}, "trainer": {"note": text, text: 1}}
    quoted = text.replace("'", "'\\''")
    script = f"python train.py --prompt-data d --hf-checkpoint '{quoted}' --note '{quoted}' --sglang-x '{quoted}'"
    for name, content in (("a.yaml", yaml.safe_dump(yaml_file)), ("run.sh", script)):
        imported = _imported(tmp_path, name, content)
        document = yaml.safe_load(imported.text())
        assert document["model"]["path"] == text
        assert set(document) == {field.partition(".")[0] for field in {*imported.values, *imported.undecided}}
        assert document["reward"] == {"functions": []}
        assert all(line.isprintable() for line in imported.text().split("\n"))


@pytest.mark.parametrize(
    ("given", "point"),
    [
        ("--advantage-estimator ppo", "--advantage-estimator ppo"),
        ("--global-batch-size 48", "--global-batch-size 48"),
        ("--use-kl-loss --kl-loss-type mse", "--kl-loss-type mse"),
        ("--lr-decay-style WSD", "--lr-decay-style WSD"),
        ("--actor-num-gpus-per-node 3 --actor-num-nodes 1 --tensor-model-parallel-size 2", "trainer.parallel.data"),
        ("--eval-prompt-data aime", "--eval-prompt-data aime"),
        ("--num-layers-per-virtual-pipeline-stage 2", "--num-layers-per-virtual-pipeline-stage 2"),
        ("--lr $LR", "--lr $LR"),
        ("--dynamic-sampling-filter-path mine.filter", "--dynamic-sampling-filter-path mine.filter"),
        ("--rollout-temperature hot", "--rollout-temperature hot"),
        ("--eps-clip wide", "algorithm.clip_low"),
        ("--num-steps-per-rollout 2 --global-batch-size 8", "--global-batch-size 8"),
        ("--num-epoch 2", "steps"),
        ("--loss-type custom_loss", "--loss-type custom_loss"),
        ("$EXTRA", "$EXTRA"),
        ("--eval-prompt-data a /b.jsonl@[0:100]", "--eval-prompt-data a /b.jsonl@[0:100]"),
        ("--rollout-stop-token-ids 1 2 $MORE", "--rollout-stop-token-ids 1 2 $MORE"),
    ],
)
def test_what_has_no_one_meaning_is_left_to_decide(tmp_path: Path, given: str, point: str) -> None:
    base = " --hf-checkpoint m --prompt-data d --rollout-batch-size 4 --n-samples-per-prompt 8"
    imported = _imported(tmp_path, "run.sh", f"python train.py {given}{base}")
    assert point in [*imported.open_points, *imported.unmatched]


def test_arrays_of_one_line_and_of_other_files(tmp_path: Path) -> None:
    """What stands before the elements of an array keeps its value; an array that is not there is named."""
    script = """source models/some.sh
SGLANG_ARGS=( --rollout-num-gpus-per-engine 4 --sglang-mem-fraction-static 0.7 )
SGLANG_ARGS+=(--rm-type "f(x)")
python3 train.py --hf-checkpoint m --prompt-data d --rollout-batch-size 4 --colocate \\
   ${MODEL_ARGS[@]} --actor-num-nodes 1 --actor-num-gpus-per-node 8 "${MORE_ARGS[@]}" ${SGLANG_ARGS[@]}
"""
    imported = _imported(tmp_path, "run.sh", script)
    assert {"${MODEL_ARGS[@]}", "${MORE_ARGS[@]}", "--rm-type f(x)"} <= set(imported.open_points)
    values = {name: value for name, (value, _) in imported.values.items()}
    assert values["cluster.placement"] == "colocated" and values["rollout.num_engines"] == 2
    assert values["rollout.engine_args.mem_fraction_static"] == 0.7 and values["cluster.nodes"] == 1


def test_files_of_neither_are_rejected(tmp_path: Path, rejects: Rejects) -> None:
    for name, content in (
        ("run.sh", "echo hello"),
        ("run.sh", "'"),
        ("a.yaml", "steps: 3"),
        ("a.yaml", "a: [1"),
        ("run.sh", "python train.py --lr 1\npython train.py --lr 2"),
    ):
        with rejects(ConfigError):
            _imported(tmp_path, name, content)
    (tmp_path / "latin.sh").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "latin.sh", tmp_path / "absent.sh", tmp_path):
        with pytest.raises(ConfigError):
            imported_config(path)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('EXTRA=""; EXTRA+=" --use-kl-loss"; {} --hf-checkpoint /m $EXTRA', ("/m", 8)),
        ('if [ -n "$D" ]; then : "${{N:=4}}"; else : "${{N:=8}}"; fi; {} --n-samples-per-prompt $N', (None, None)),
        ('prepare() {{ : "${{N:=4}}"; }}\nN=${{N:-8}}; {} --n-samples-per-prompt $N', (None, None)),
        ('test -n "$B" && echo ${{N:=5}}; {} --n-samples-per-prompt ${{N:-8}}', (None, None)),
        ('A="--hf-checkpoint /m"; ARGS=("$A" --n-samples-per-prompt\\ 6); {} ${{ARGS[@]}}', ("/m", 6)),
    ],
)
def test_a_shell_splits_and_sets(tmp_path: Path, script: str, expected: tuple[str | None, int | None]) -> None:
    """As bash does; ``None``: not known before it runs."""
    command = "python3 train.py --prompt-data d --num-rollout 9"
    if "--n-samples" not in script:
        command += " --n-samples-per-prompt 8"
    values = _imported(tmp_path, "run.sh", script.format(command)).values
    names = ("model.path", "rollout.samples_per_prompt")
    assert tuple(values[name][0] if name in values else None for name in names) == expected


def test_another_train_py_is_no_launch_of_slime(tmp_path: Path, rejects: Rejects) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python train.py --config foo.yaml\n")
    with rejects(ConfigError, code="foreign-unknown"):
        imported_config(path)


def test_a_rate_of_adapters_and_a_critic_leave_their_fields_undecided(tmp_path: Path) -> None:
    script = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae actor_rollout_ref.model.lora_rank=64 "
        "actor_rollout_ref.actor.optim.lr=3e-5 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05 "
        "trainer.total_training_steps=500 data.train_batch_size=1024 actor_rollout_ref.actor.ppo_mini_batch_size=256"
    )
    imported = _imported(tmp_path, "run.sh", script)
    assert {"algorithm.advantage", "trainer.optimizer.lr"} <= imported.undecided
    assert imported.values["trainer.optimizer.warmup_steps"][0] == 100
    written = yaml.safe_load(imported.text())
    assert written["algorithm"]["advantage"] == written["trainer"]["optimizer"]["lr"] == UNDECIDED
