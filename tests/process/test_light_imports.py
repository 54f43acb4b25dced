"""Importing configuration, reports and figures brings neither torch, Ray nor a plotting package."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    ["slime_like.config", "slime_like.config.reading.load", "slime_like.checks.check", "slime_like.commands.main"],
)
def test_configuration_imports_neither_torch_nor_ray(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'ray', 'transformers'}} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["orphan_reaper", "ray_process"])
def test_processes_beside_ray_import_no_torch(module: str) -> None:
    code = f"import sys, slime_like.orchestration.cluster.{module}; print({{'torch'}} & sys.modules.keys())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "set()"


def test_a_report_needs_neither_torch_nor_ray_nor_a_plotting_package() -> None:
    code = (
        "import sys, slime_like.commands.report, slime_like.observability.report.console;"
        "print(sorted({'torch', 'ray', 'matplotlib', 'transformers', 'tensorboard', 'wandb'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_observability_needs_neither_matplotlib_nor_ray_nor_torch_to_be_imported() -> None:
    """Log readers and progress must start quickly, and no import may choose a plotting backend for the user."""
    modules = ("phases", "records", "names", "metrics", "progress", "curve")
    code = (
        f"import sys; [__import__('slime_like.observability.' + name) for name in {modules!r}];"
        "print(sorted({'torch', 'ray', 'matplotlib', 'tensorboard', 'wandb', 'rich'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
