"""A replay's comparison names the first token, figure or tensor that rounding does not explain."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.commands.root import run
from slime_like.config.reading.load import load_config, save_config
from slime_like.errors import ConfigError, DataError
from slime_like.trajectory import ScoredTrajectory
from slime_like.verification.layouts import TOLERANCES
from slime_like.verification.replay import Bounds, Capsule, Line, compare_figures, compare_tokens, compare_weights
from slime_like.weights.fingerprint import Fingerprint
from tests.support.rejections import Rejects

EXACT = Bounds(TOLERANCES["float32"])
ROUNDED = replace(EXACT, exact=False, change=0.5, least_norm=1.0)
SHAPES = {"lm_head.weight": (16, 8), "model.embed_tokens.weight": (16, 8)}
SHAPES |= {f"model.layers.{layer}.self_attn.q_proj.weight": (8, 8) for layer in (10, 2)}


def rows() -> list[ScoredTrajectory]:
    lengths, found = [(3, 4), (2, 5), (4, 1)], []
    for index, (prompt, response) in enumerate(lengths):
        ids = torch.arange(prompt + response) + 10 * index
        found.append(ScoredTrajectory.unrewarded(f"0-{index}", ids[:prompt], ids[prompt:], group_id=0))
    return found


def values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {row.sequence_id: -torch.rand(row.response_len, generator=generator) for row in rows()}


def line(recorded: dict[str, Tensor], found: dict[str, Tensor], bound: float) -> Line:
    sides = [{("old_logprobs", name): each for name, each in side.items()} for side in (recorded, found)]
    gaps = compare_tokens("old_logprobs", sides[0], sides[1], rows(), bound, lambda ids: f"<{ids[0]}>")
    return Line.of(5, "old_logprobs", gaps)


@pytest.mark.parametrize("bound", [0.0, 1e-4])
def test_equal_tokens_are_within_every_bound(bound: float) -> None:
    found = line(values(), values(), bound)
    assert (found.count, found.largest, found.wrong, found.first) == (10, 0.0, 0, None)


@pytest.mark.parametrize("value", [0.25, math.nan, math.inf])
def test_the_first_token_that_differs_is_named(value: float) -> None:
    recorded, changed = values(), values()
    recorded["0-1"][2] = value
    recorded["0-2"][0] = 9.0
    changed["0-0"][1] += 5e-5  # rounding
    found = line(recorded, changed, 1e-4)
    assert found.wrong == 2 and found.first is not None
    place = {name: found.first[name] for name in ("sequence", "response_token", "position", "id", "text")}
    assert place == {"sequence": "0-1", "response_token": 2, "position": 4, "id": 14, "text": "<14>"}
    assert found.first["recomputed"] == float(changed["0-1"][2])
    assert str(found).startswith("step 5, old_logprobs: sequence 0-1, response token 2, position 4, id 14,")
    exact = line(recorded, changed, 0.0)  # even rounding is a difference
    assert exact.wrong == 3 and exact.first is not None
    assert (exact.first["sequence"], exact.first["response_token"]) == ("0-0", 1)


def test_a_missing_sequence_and_another_length_differ() -> None:
    recorded, found = values(), values()
    del recorded["0-1"]
    found["0-2"] = torch.zeros(3)
    compared = line(recorded, found, 10.0)
    assert compared.wrong == 2 and compared.largest > 1e300
    assert compared.first == {"values of sequence": "0-1", "recorded": None, "recomputed": 5}


def test_the_same_infinities_are_equal_and_integers_are_compared() -> None:
    infinite = {name: torch.full_like(each, -math.inf) for name, each in values().items()}
    assert line(infinite, infinite, 0.0).wrong == 0
    masks = {name: each < 0 for name, each in values().items()}
    other = {name: each.clone() for name, each in masks.items()}
    other["0-2"][0] = False
    first = line(masks, other, 0.0).first
    assert first is not None and (first["recorded"], first["recomputed"]) == (True, False)


FIGURES = {"loss": -0.5, "grad_norm": 0.25, "num_tokens": 40.0, "clipfrac": 0.1, "entropy": 2.0, "learning_rate": 1e-3}


@pytest.mark.parametrize(
    ("name", "rounding", "fault"),
    [("loss", 1e-6, 1e-3), ("grad_norm", 1e-5, 1e-3), ("entropy", 1e-5, 1e-2), ("num_tokens", 0, 1)],
)
def test_a_changed_figure_is_named(name: str, rounding: float, fault: float) -> None:
    def compared(by: float, bounds: Bounds) -> Line:
        other = FIGURES | {name: FIGURES[name] + by}
        return Line.of(5, "figures", compare_figures([FIGURES, FIGURES], [FIGURES, other], bounds, is_start=True))

    first_update = replace(ROUNDED, change=0.0)
    assert compared(rounding, first_update).wrong == 0
    found = compared(fault, first_update)
    assert found.wrong == 1 and found.first is not None
    assert (found.first["figure"], found.first["update"]) == (name, 2)
    assert compared(0.0, EXACT).wrong == 0
    assert compared(rounding, EXACT).wrong == (rounding > 0)


def test_figures_that_jump_are_compared_only_bit_for_bit() -> None:
    other = FIGURES | {"clipfrac": 0.2}
    assert not any(gap.size > gap.bound for gap in compare_figures([FIGURES], [other], ROUNDED, True))
    assert sum(gap.size > gap.bound for gap in compare_figures([FIGURES], [other], EXACT, True)) == 1


@pytest.mark.parametrize("bounds", [EXACT, ROUNDED])
def test_another_number_of_updates_differs(bounds: Bounds) -> None:
    first = Line.of(5, "figures", compare_figures([FIGURES, FIGURES], [FIGURES], bounds, True)).first
    assert first == {"figure": "updates", "recorded": 2, "recomputed": 1}


def test_bounds_after_the_first_update_follow_the_change_of_logprobs() -> None:
    """An element whose gradient is within the shift of 1e-4 may move two updates away from another layout's."""
    share = 2 * math.sqrt(2 * (1e-4 + 2.0**-23))
    assert ROUNDED.of_value("old_logprobs", 1.0, is_start=True) == 1e-4
    assert ROUNDED.of_value("old_logprobs", 1.0, is_start=False) == pytest.approx(1e-4 + share * 0.5)
    assert ROUNDED.of_value("logprobs", 1.0, is_start=False) == 0.0  # the engine's, which are inputs
    assert replace(ROUNDED, least_norm=1e-9).drift == 1.0  # gradients are rounding, and so is every update


def fingerprints(**changed: float) -> dict[str, Any]:
    generator, found = torch.Generator().manual_seed(0), {}
    for name, shape in SHAPES.items():
        tensor = torch.randn(shape, generator=generator)
        moves = torch.randn(shape, generator=generator) * changed.get("all", 0.0)
        tensor = tensor + moves
        tensor[0, 0] += changed.get(name.split(".")[-2], 0.0)
        found[name] = asdict(Fingerprint.of(tensor))
    return found


def test_tensors_are_compared_in_the_order_of_the_model() -> None:
    trained = fingerprints(all=1e-3)
    found = Line.of(
        5, "weights", compare_weights(trained, fingerprints(all=1e-3, q_proj=1e-3), ROUNDED, fingerprints())
    )
    assert found.wrong == 2 and found.first is not None
    assert found.first["tensor"] == "model.layers.2.self_attn.q_proj.weight"
    assert found.first["distance"] == pytest.approx(1e-3, rel=1e-3)
    assert Line.of(5, "weights", compare_weights(trained, trained, EXACT, trained)).wrong == 0


def test_rounding_of_weights_is_relative_to_their_change() -> None:
    start, trained, rounded = fingerprints(), fingerprints(all=1e-3), fingerprints(all=1.001e-3)
    assert not any(gap.size > gap.bound for gap in compare_weights(trained, rounded, ROUNDED, start))
    assert all(gap.size > gap.bound for gap in compare_weights(trained, rounded, EXACT, start))
    assert all(gap.size > gap.bound for gap in compare_weights(trained, fingerprints(all=1.1e-3), ROUNDED, start))
    assert all(gap.size > gap.bound for gap in compare_weights(trained, start, ROUNDED, start))  # nothing was trained


def test_a_missing_tensor_differs() -> None:
    ours, theirs = fingerprints(), fingerprints()
    del theirs["model.embed_tokens.weight"]
    found = Line.of(5, "weights", compare_weights(ours, theirs, ROUNDED, ours))
    assert found.first == {"tensor": "model.embed_tokens.weight", "recorded": True, "recomputed": False}


@pytest.mark.parametrize("content", [None, "{", "[]", '{"step": 3}'])
def test_a_directory_without_a_whole_description_is_no_capsule(
    content: str | None, tmp_path: Path, rejects: Rejects
) -> None:
    if content is not None:
        (tmp_path / "capsule.json").write_text(content)
        torch.save({}, tmp_path / "tokens.pt")
    with rejects(DataError, "no-capsule"):
        Capsule.read(tmp_path)


def test_a_capsule_with_damaged_tokens_is_rejected(tmp_path: Path, rejects: Rejects) -> None:
    (tmp_path / "capsule.json").write_text(json.dumps({"step": 1, "base": 0, "machine": {}}))
    (tmp_path / "tokens.pt").write_bytes(b"PK\x03\x04 cut off")
    with rejects(DataError, "no-capsule"):
        Capsule.read(tmp_path)


@pytest.mark.parametrize("base", [0, 2])
def test_a_replay_trains_the_recorded_batches_from_the_checkpoint(base: int, tmp_path: Path) -> None:
    flags = ["--debug.capsule", "[3]", "--profile.steps", "[3]", "--logging.tensorboard", "true", "--steps", "9"]
    given = load_config(None, ["--run_dir", str(tmp_path / "run"), "--model.path", str(tmp_path), *flags])
    save_config(given, tmp_path / "config.yaml")
    capsule = Capsule(tmp_path, 3, base, {}, {})
    config = capsule.config(["--run_dir", str(tmp_path / "other"), "--trainer.parallel.tensor", "2"])
    assert config.resume == (str(tmp_path / "checkpoints" / "step-000002") if base else "never")
    assert config.debug.load_rollouts == tmp_path / "rollouts" and not config.starts_engines
    assert (config.debug.capsule, config.profile.steps, config.logging.tensorboard) == ((), (), False)
    assert config.trainer.parallel.tensor == 2 and config.schedule == given.schedule  # all steps count


def test_a_replay_does_not_touch_a_directory_that_exists(tmp_path: Path, rejects: Rejects) -> None:
    """Least of all its own run's."""
    save_config(load_config(None, ["--run_dir", str(tmp_path), "--model.path", "none"]), tmp_path / "config.yaml")
    (tmp_path / "capsule.json").write_text(json.dumps({"step": 1, "base": 0, "machine": {}}))
    torch.save({}, tmp_path / "tokens.pt")
    with rejects(ConfigError, "run-dir-exists"):
        run(["replay", str(tmp_path), "--run_dir", str(tmp_path)])
    with rejects(ConfigError, "file-unusable"):
        run(["replay", str(tmp_path), "--output", str(tmp_path)])
