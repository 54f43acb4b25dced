"""Headless browser that opens a page and runs its script."""

import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Quiet, and without network traffic: the page under test is a local file.
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--enable-logging=stderr", "--hide-scrollbars",
)  # fmt: skip


@dataclass(frozen=True)
class Rendered:
    """The page after its script ran, and the lines on the browser's console."""

    dom: str
    console: list[str]


def find_browser() -> str | None:
    """Return the path of an installed browser, or ``None``."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def dump_dom(browser: str, page: Path, profile: Path, timeout_s: float = 60.0) -> Rendered:
    """Open ``page`` with a fresh ``profile`` directory and return the loaded page."""
    done = _run(browser, ["--dump-dom", "--virtual-time-budget=5000"], page, profile, timeout_s)
    return Rendered(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])


def screenshot(
    browser: str,
    page: Path,
    png: Path,
    profile: Path,
    size: tuple[int, int] = (1280, 2400),
    dark: bool = False,
    timeout_s: float = 60.0,
) -> None:
    """Save a picture of ``page``'s first ``size`` pixels in the light or dark color scheme."""
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    flags = [f"--screenshot={png}", f"--window-size={size[0]},{size[1]}", scheme, "--virtual-time-budget=5000"]
    _run(browser, flags, page, profile, timeout_s)
    if not png.is_file():
        raise AssertionError(f"{browser} wrote no picture of {page}")


def _run(
    browser: str, flags: list[str], page: Path, profile: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    command = [browser, *_FLAGS, f"--user-data-dir={profile}", *flags, page.resolve().as_uri()]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        encoding="utf-8", errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise AssertionError(f"{browser} ended with {process.returncode}:\n{stderr[-2000:]}")
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
