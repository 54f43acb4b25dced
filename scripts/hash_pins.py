"""Write scripts/hashes.txt: what pip accepts for each pin of constraints.txt, on Linux x86-64 with Python 3.11 or 3.12.

python scripts/hash_pins.py [INDEX]     after a pin has changed; INDEX is PyPI unless it is given

torch is left out: its CPU build is on another index.
"""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path
from urllib.parse import unquote
from urllib.request import Request, urlopen

REPO = Path(__file__).resolve().parents[1]
INDEX = "https://pypi.org/simple"
_FILE = re.compile(r'href="[^"#]*?/?([^"/#]+)#sha256=([0-9a-f]{64})"')
_WHEEL = re.compile(
    r"-(?:py\d+(?:\.py\d+)*-none|cp31[12]-cp31[12]|cp3\d+(?:\.\w+)*-abi3)-(?:any|.*manylinux.*_x86_64.*)\.whl$"
)
_TIMEOUT_S = 60


def normal(text: str) -> str:
    """A project's name as indexes spell it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", text).lower()


def pins() -> list[str]:
    """``name==version`` of every package but torch."""
    lines = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [re.split(r"[;#\s]", line, maxsplit=1)[0] for line in lines]
    return [pin for pin in found if pin and not pin.startswith("torch==")]


def hashes(pin: str, index: str) -> list[str]:
    """SHA-256 of each wheel that fits, or else of the source archive, as the index lists them."""
    name, version = pin.split("==")
    with urlopen(Request(f"{index}/{normal(name)}/", headers={"Accept": "text/html"}), timeout=_TIMEOUT_S) as page:
        files = _FILE.findall(unescape(page.read().decode()))
    begin = normal(f"{name}-{version}") + "-"
    wheels = sorted(digest for file, digest in files if normal(unquote(file)).startswith(begin) and _WHEEL.search(file))
    archive = f"{normal(f'{name}-{version}')}-tar-gz"
    return wheels or [digest for file, digest in files if normal(unquote(file)) == archive]


def main(index: str = INDEX) -> int:
    with ThreadPoolExecutor(8) as threads:
        found = dict(zip(pins(), threads.map(lambda pin: hashes(pin, index), pins()), strict=True))
    if missing := [pin for pin, digests in found.items() if not digests]:
        print(f"{index} has no fitting file of {', '.join(missing)}; nothing was written", file=sys.stderr)
        return 1
    lines = [" ".join([pin, *(f"--hash=sha256:{digest}" for digest in digests)]) for pin, digests in found.items()]
    (REPO / "scripts" / "hashes.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
