"""The running mean compared with NumPy, and the plot by its pixels."""

import json
from pathlib import Path

import matplotlib.backends.backend_agg  # here, so the import's time does not count for the first test
import matplotlib.figure
import matplotlib.image
import matplotlib.ticker
import numpy as np
import pytest

from slime_like.observability.metrics import plot_reward_curve, running_mean

REWARD_BLUE = (0x00, 0x72, 0xB2)
ACCURACY_VERMILION = (0xD5, 0x5E, 0x00)


def count_pixels(png: Path, color: tuple[int, int, int]) -> int:
    pixels = np.round(matplotlib.image.imread(png)[..., :3] * 255)
    return int((np.abs(pixels - color).max(axis=-1) < 3).sum())


@pytest.mark.parametrize("window", [1, 3, 10, 50])
def test_running_mean(window: int) -> None:
    values = np.random.default_rng(0).random(30)
    expected = [values[max(0, i + 1 - window) : i + 1].mean() for i in range(30)]
    assert running_mean(values.tolist(), window) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("steps", "accuracy"), [(1, True), (40, False)])
def test_plot(tmp_path: Path, steps: int, accuracy: bool) -> None:
    rows = [{"step": step, "ref_actor_rewards/total_reward_mean": step / steps} for step in range(1, steps + 1)]
    if accuracy:
        rows = [{"step": 0, "evaluation/accuracy": 0.5}, *rows, {"step": steps, "evaluation/accuracy": 0.5}]
    log, png = tmp_path / "metrics.jsonl", tmp_path / "new" / "curve.png"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot_reward_curve(log, png)
    assert matplotlib.image.imread(png).shape[:2] == (720, 1280)
    assert count_pixels(png, REWARD_BLUE) > 50
    assert (count_pixels(png, ACCURACY_VERMILION) > 50) == accuracy
