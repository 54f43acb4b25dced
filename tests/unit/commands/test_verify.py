"""``slime-like verify layouts``, comparisons of checkpoints, and generated pages."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slime_like.commands.main import main
from slime_like.commands.reference import page_text
from slime_like.commands.verify import _layout_config
from slime_like.config import RunConfig
from slime_like.conversion.convert import Difference, compare_sources
from slime_like.errors import INTERRUPTED, CheckpointError
from slime_like.interfaces.conversion import TensorInfo
from slime_like.verification import verify
from slime_like.verification.comparison import Parity
from slime_like.verification.layouts import parse_layout
from slime_like.verification.verify import LayoutResult, device_misfit, setting_misfit
from tests.unit.checks.checkpoint import EXPERTS, write_checkpoint


def test_a_layout_needs_as_many_devices_as_ranks() -> None:
    eight = parse_layout("tp2-pp2-cp2")
    assert device_misfit(eight, {"CPU": 8.0}) is None
    assert device_misfit(eight, {"CPU": 64.0, "GPU": 8.0}) is None
    assert device_misfit(eight, {"CPU": 64.0, "GPU": 4.0}) == "needs 8 ranks; available: 4 GPUs"
    assert device_misfit(parse_layout("dp16"), {"CPU": 64.0}) == "needs 16 ranks; available: 8 CPU slots"


def test_the_users_flags_take_precedence(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    config = _layout_config(
        model, ["--steps", "5", "--algorithm.loss", "gspo", "--model.dtype", "bfloat16"], synthetic=True
    )
    assert (config.steps, config.algorithm.loss.name, config.model.dtype) == (5, "gspo", "bfloat16")
    assert config.trainer.optimizer.lr == 3e-2 and config.trainer.target_tokens_per_batch == 192
    float32 = _layout_config(model, ["--trainer.optimizer.lr", "0.5", "--model.dtype", "float32"], synthetic=False)
    assert (float32.steps, float32.trainer.optimizer.lr) == (2, 0.5)
    assert float32.trainer.target_tokens_per_batch == 8192
    assert float32.algorithm.kl.coef > 0 and float32.algorithm.entropy_coef > 0
    experts = write_checkpoint(tmp_path / "experts", **EXPERTS)
    assert _layout_config(experts, [], synthetic=True).algorithm.moe_aux_loss_coef > 0


def test_attention_that_a_layout_names_must_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(run_dir=tmp_path, model={"path": tmp_path})
    monkeypatch.setattr("slime_like.checks.packages.find_spec", lambda name: None)
    reason = setting_misfit(parse_layout("cp2-ring_flash_attn").apply_to(config))
    assert reason is not None and "needs the package ring_flash_attn" in reason
    assert setting_misfit(parse_layout("cp2-allgather").apply_to(config)) is None


def test_an_interrupt_keeps_the_finished_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_checkpoint(tmp_path / "model")

    def interrupted(*given: object, **settings: object) -> Iterator[LayoutResult]:
        yield LayoutResult("single", 1, Parity())
        yield LayoutResult("tp2", 2, Parity(differences=["token 3 is wrong"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "verify_layouts", interrupted)
    assert main(["verify", "layouts", "--model", str(model), "--layouts", "tp2", "cp2", "dp2"]) == INTERRUPTED
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("│")] == ["single", "tp2", "cp2", "dp2"]
    assert lines[-3:] == ["tp2: token 3 is wrong", "cp2: not compared", "dp2: not compared"]


class InMemory:
    """A source whose tensors are read in groups of two."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._values = tensors
        self.tensors = {
            name: TensorInfo(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in tensors.items()
        }

    @property
    def groups(self) -> list[list[str]]:
        names = list(self._values)
        return [names[start : start + 2] for start in range(0, len(names), 2)]

    def read(self, names: list[str]) -> dict[str, Tensor]:
        return {name: self._values[name] for name in names}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(4, 3, generator=generator),
        "b": torch.randn(5, generator=generator).bfloat16(),
        "c": torch.randn(2, 2, generator=generator).half(),
        "scalar": torch.tensor(3.0),
    }


def differences(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[Difference]:
    return compare_sources(InMemory(ours), InMemory(theirs), 2, lambda done, total: None)


def test_values_count_and_progress_is_in_bytes() -> None:
    assert differences(tensors(), tensors()) == []
    assert differences(tensors(), tensors() | {"a": tensors()["a"].t().contiguous().t()}) == []
    reports: list[tuple[int, int]] = []
    compare_sources(InMemory(tensors()), InMemory(tensors()), 1, lambda done, total: reports.append((done, total)))
    assert reports[-1] == (12 * 4 + 5 * 2 + 4 * 2 + 4,) * 2


def test_every_difference_is_named() -> None:
    theirs = tensors() | {"a": tensors()["a"].double(), "c": torch.zeros(4, 1).half(), "extra": torch.zeros(1)}
    theirs["b"][2] += 1
    del theirs["scalar"]
    assert differences(tensors(), theirs) == [
        ("a", "type float32 in A, float64 in B"),
        ("b", "values: 1 of 5 differ, by at most 1"),
        ("c", "shape [2, 2] in A, [4, 1] in B"),
        ("extra", "only in B"),
        ("scalar", "only in A"),
    ]


def test_bits_count_and_damage_ends_the_comparison() -> None:
    """0 and -0 are equal as numbers. A NaN equals itself only as bits."""
    zero, minus = {"x": torch.zeros(3)}, {"x": -torch.zeros(3)}
    assert differences(zero, minus) == [Difference("x", "values: 3 of 3 differ, by at most 0")]
    nan = {"x": torch.tensor([1.0, float("nan")])}
    assert differences(nan, {"x": nan["x"].clone()}) == []
    assert differences(nan, {"x": torch.ones(2)}) == [Difference("x", "values: 1 of 2 differ, by at most inf")]

    class Damaged(InMemory):
        def read(self, names: list[str]) -> dict[str, Tensor]:
            raise CheckpointError("it is damaged")

    with pytest.raises(CheckpointError):
        compare_sources(InMemory(tensors()), Damaged(tensors()), 2, lambda done, total: None)


@pytest.mark.parametrize("page", ["configuration", "rewards"])
def test_generated_pages_are_current(page: str) -> None:
    path = Path(__file__).parents[3] / "docs" / f"{page}.md"
    assert path.read_text() == page_text(path), "run: python -m slime_like.commands.reference"
