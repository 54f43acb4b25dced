"""What is imported by commands, reports and the processes beside Ray, and what is not: each must start quickly."""

import subprocess
import sys

import pytest

CONFIGURATION = ("config", "config.reading.load", "checks.check", "commands.main")
BESIDE_RAY = ("orchestration.cluster.orphan_reaper", "orchestration.cluster.ray_process")
REPORT = ("commands.report", "observability.report.console")
# Log readers and progress; and no import may choose a plotting backend for the user.
OBSERVABILITY = tuple(
    f"observability.{name}" for name in ("phases", "records", "names", "metrics", "progress", "curve")
)
LOGS = {"torch", "ray", "matplotlib", "tensorboard", "wandb"}


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        *((module, {"torch", "ray", "transformers"}) for module in CONFIGURATION),
        *((module, {"torch"}) for module in BESIDE_RAY),
        (" ".join(REPORT), LOGS | {"transformers"}),
        (" ".join(OBSERVABILITY), LOGS | {"rich"}),
    ],
)
def test_what_is_not_imported(modules: str, absent: set[str]) -> None:
    imports = ", ".join(f"slime_like.{module}" for module in modules.split())
    code = f"import sys, {imports}; print(sorted({absent!r} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"
