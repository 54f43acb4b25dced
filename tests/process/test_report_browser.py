"""The report in a real browser, running its script and using its controls."""

import json
import re
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import NAMES, dump_dom, find_browser, screenshot
from tests.unit.observability.report_run import HOSTILE, SAMPLES, STEPS, TABLES_EVERY, TOKENS, write_report, write_run

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser on PATH ({', '.join(NAMES)})")
LOGGED = STEPS // TABLES_EVERY * SAMPLES

USER = Path(__file__).with_name("report_reader.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("browser")
    return write_report(write_run(root / "run"), root / "report.html")


@pytest.fixture(scope="module")
def seen(report: Path) -> dict[str, Any]:
    frame = f'<iframe width="1200" height="900" srcdoc="{escape(report.read_text(encoding="utf-8"))}"></iframe>'
    user = report.parent / "user.html"
    script = f"<script>addEventListener('load', () => {{{USER}}})</script>"
    user.write_text(f'<!DOCTYPE html><meta charset="utf-8">{frame}<pre id="seen"></pre>{script}', encoding="utf-8")
    done = dump_dom(str(BROWSER), user, report.parent / "user profile")
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.dom, re.DOTALL)
    assert found and found[1] and not done.console, done.console
    result: dict[str, Any] = json.loads(unescape(found[1]))
    return result


def test_script_runs_without_errors(report: Path) -> None:
    """Script errors and blocks by the content security policy would be on the console."""
    rendered = dump_dom(str(BROWSER), report, report.parent / "profile")
    assert rendered.console == []
    assert 'data-ready="yes"' in rendered.dom
    assert f"{LOGGED} of {LOGGED} rows" in rendered.dom
    assert rendered.dom.count('<span class="token') == TOKENS


def test_hostile_text_stays_text(seen: dict[str, Any]) -> None:
    assert seen["title"] == ["Run run", "Run run"]
    assert (seen["scripts"], seen["elements"]) == (4, [0, 0, 0, 0])
    assert seen["texts"] == list(HOSTILE[:TOKENS])


def test_tables_sort_and_filter(seen: dict[str, Any]) -> None:
    """Numeric, in both directions, with empty cells always last."""
    before, up, down = seen["order"]
    assert before == ["10", "9", "8", "7"] * 3
    assert up == ["7"] * 3 + ["8"] * 3 + ["9"] * 3 + ["10"] * 3
    assert down == up[::-1]
    for gaps in seen["gaps"]:
        assert "-" not in gaps[:3] and gaps[3:] == ["-"] * (LOGGED - 3)
    assert seen["shown"] == [f"{SAMPLES} of {LOGGED} rows", SAMPLES]


def test_tokens_are_shaded_by_their_gap(seen: dict[str, Any]) -> None:
    """Shades are logarithmic from 1e-4 to 1 nat: none at 1e-5, half at 1e-2. Surprise is linear: 3 of 8 nats."""
    assert seen["choices"] == LOGGED
    engine, reference, surprise, last = seen["levels"]
    assert engine == [0] * TOKENS
    assert reference == pytest.approx([0.925] * TOKENS, abs=2e-3)
    assert surprise[-1] == pytest.approx(0.375, abs=1e-3) and surprise == sorted(surprise)
    assert seen["chosen"] == "step 10, 10-3<i>, 6 tokens"
    assert last == pytest.approx([0.5] * TOKENS, abs=2e-3)
    assert seen["kinds"] == ["token"] * (TOKENS - 1) + ["token masked"]
    assert seen["without"] == ["token none"] * (TOKENS - 1) + ["token none masked"]
    assert seen["details"] == TOKENS


def test_every_curve_and_bar_is_drawn(seen: dict[str, Any]) -> None:
    """Mean reward and its running mean, two functions, accuracy, loss and policy loss, others, seven phases."""
    assert seen["drawn"][:4] == [2, 2, 1, 2] and seen["drawn"][-1] == 7
    assert all(seen["drawn"]) and len(seen["drawn"]) == 18


@pytest.mark.acceptance
@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark(report: Path, tmp_path: Path, dark: bool) -> None:
    """Check the pixels: the paper, a curve and the largest phase."""
    import numpy as np
    from PIL import Image

    png = tmp_path / "page.png"
    screenshot(str(BROWSER), report, png, tmp_path / "profile", size=(1280, 6000), dark=dark)
    pixels = np.asarray(Image.open(png).convert("RGB")).astype(int)
    assert (pixels[5, 5] == ((0x15, 0x17, 0x1A) if dark else (255, 255, 255))).all()
    for color, least in (((0x3F, 0x8F, 0xC9), 500), ((0xD5, 0x5E, 0x00), 20_000)):
        assert int((np.abs(pixels - color).max(axis=-1) < 3).sum()) > least, color
