"""A normal install, used outside the source tree."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.unit.observability.report_run import write_run

REPO = Path(__file__).resolve().parents[2]

PROBE = """
import json, slime_like, backends.megatron.trainer, rollout.vllm.engine
from importlib.metadata import distribution
from slime_like.interfaces import load_backend, load_engine
found = {p.name: p.value for p in distribution("slime-like").entry_points}
print(json.dumps({
    "files": [slime_like.__file__, backends.__file__, rollout.__file__],
    "loaded": [load_backend(name).__name__ for name in ("megatron", "fsdp")]
    + [load_engine(name).__name__ for name in ("vllm", "sglang", "transformers")],
    "entry_points": sorted(found),
    "requires": distribution("slime-like").requires,
}))
"""


def test_a_normal_install_works_from_another_directory(tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    source = tmp_path / "source"  # building must not write into the tested tree
    git = ["git", "-c", "safe.directory=*"]  # the checkout may belong to another user
    listing = subprocess.run([*git, "ls-files", "-z"], cwd=REPO, capture_output=True, check=True).stdout
    for name in filter(None, listing.decode().split("\0")):
        if (REPO / name).is_file() and not name.startswith(("tests/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPO / name).read_bytes())
    subprocess.run([*pip, str(target), str(source)], check=True, timeout=120)

    # PYTHONPATH comes before the editable install of the tests.
    env = {**os.environ, "PYTHONPATH": str(target)}
    answer = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout.splitlines()[-1])
    assert all(file.startswith(str(target)) for file in found["files"])
    assert found["loaded"] == ["MegatronTrainer", "FsdpTrainer", "VllmEngine", "SglangEngine", "TransformersEngine"]
    assert found["entry_points"] == ["fsdp", "megatron", "sglang", "slime-like", "slime_like", "transformers", "vllm"]

    heavy = [each for each in found["requires"] if each.startswith(("torch", "megatron-core"))]
    assert heavy and all("extra ==" in each for each in heavy)  # a light install has none

    script = target / "bin" / "slime-like"
    run_dir = write_run(tmp_path / "run")
    for arguments, words in ((["train", "--help"], "--trainer.parallel.tensor"), (["report", str(run_dir)], "")):
        command = [sys.executable, str(script), *arguments]
        assert words in subprocess.check_output(command, cwd=tmp_path, env=env, text=True, timeout=60)
    page = (run_dir / "report.html").read_text()
    assert "--paper: #fff" in page and '"use strict";' in page  # style and script are files of the package
