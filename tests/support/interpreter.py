"""Another interpreter for engines, made cheaply."""

import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import slime_like

HIDDEN = ("ray", "megatron", "math_verify", "ring_flash_attn", "tensorboard", "matplotlib")
"""What an engine's environment need not have."""


def make_interpreter(root: Path, version: str = slime_like.__version__) -> Path:
    """A virtual environment with the packages of this one, without the trainer's."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True, timeout=60)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(root)}))
    here = Path(slime_like.__file__).parents[1]
    blocked = f"import sys; sys.modules.update(dict.fromkeys({HIDDEN!r}))"
    (packages / "shared.pth").write_text(f"{blocked}\n{here}\n{sysconfig.get_path('purelib')}\n")
    info = packages / f"slime_like-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: slime-like\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(metadata.distribution("slime-like").read_text("entry_points.txt") or "")
    return root / "bin" / "python"
