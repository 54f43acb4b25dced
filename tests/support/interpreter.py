"""Another interpreter for engines, made cheaply."""

import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import slime_like

HIDDEN = ("megatron", "math_verify", "ring_flash_attn", "tensorboard")
"""What an engine's environment need not have."""


def make_interpreter(root: Path) -> Path:
    """A virtual environment with this one's packages but the trainer's. Its file ``started`` lists its programs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True, timeout=60)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(root)}))
    here = Path(slime_like.__file__).parents[1]
    blocked = f"import sys; sys.modules.update(dict.fromkeys({HIDDEN!r}))"
    noted = f"open({str(root / 'started')!r}, 'a').write(' '.join(sys.orig_argv) + chr(10))"
    (packages / "shared.pth").write_text(f"{blocked}; {noted}\n{here}\n{sysconfig.get_path('purelib')}\n")
    info = packages / "slime_like.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: slime-like\nVersion: {slime_like.__version__}\n")
    (info / "entry_points.txt").write_text(metadata.distribution("slime-like").read_text("entry_points.txt") or "")
    return root / "bin" / "python"
