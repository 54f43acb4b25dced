"""Put known bugs into exported adapters and merged models, one at a time: the comparison with PEFT must notice each."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.common.hugging_face import converter
from backends.megatron.offline.converter import MegatronSource
from tests.mutation.planted import Bug, Patch, no_bug
from tests.parallel.test_lora_checkpoint import Saved, check_adapter, check_whole, converted, expected_logits


def alpha_is_forgotten(patch: Patch) -> None:
    correct = converter.write_adapter_settings

    def write(directory: Path, lora: Any, *rest: Any) -> None:
        correct(directory, lora.model_copy(update={"alpha": float(lora.rank)}), *rest)

    patch.setattr(converter, "write_adapter_settings", write)


def keys_and_values_are_swapped(patch: Patch) -> None:
    """Their factors have the same shapes."""
    correct = MegatronSource.read

    def read(self: MegatronSource, names: list[str]) -> dict[str, Tensor]:
        found = correct(self, names)
        return {name: found.get(_other(name), tensor) for name, tensor in found.items()}

    patch.setattr(MegatronSource, "read", read)


def _other(name: str) -> str:
    kinds = {"k_proj": "v_proj", "v_proj": "k_proj"}
    return next((name.replace(kind, other) for kind, other in kinds.items() if kind in name), name)


def the_adapter_is_zero(patch: Patch) -> None:
    correct = MegatronSource.read
    patch.setattr(
        MegatronSource, "read", lambda *given: {name: torch.zeros_like(one) for name, one in correct(*given).items()}
    )


def the_base_is_not_merged(patch: Patch) -> None:
    patch.setattr(converter._Merged, "_merged", lambda self, name, tensor: tensor)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Saved, Tensor]:
    run = Saved(tmp_path_factory.mktemp("run"), "qwen3", "single")
    return run, expected_logits(run)


IN_ADAPTERS: list[Bug] = [no_bug, alpha_is_forgotten, keys_and_values_are_swapped, the_adapter_is_zero]
IN_MERGED_MODELS: list[Bug] = [no_bug, keys_and_values_are_swapped, the_adapter_is_zero, the_base_is_not_merged]


@pytest.mark.parametrize(
    ("bug", "merge"), [*((bug, False) for bug in IN_ADAPTERS), *((bug, True) for bug in IN_MERGED_MODELS)]
)
def test_a_wrong_output_is_noticed(
    bug: Bug, merge: bool, saved: tuple[Saved, Tensor], tmp_path: Path, monkeypatch: Patch
) -> None:
    run, expected = saved
    bug(monkeypatch)
    output = converted(run, tmp_path / "output", merge=merge)
    with nullcontext() if bug is no_bug else pytest.raises(AssertionError, match="not close"):
        if merge:
            check_whole(output, expected)
        else:
            check_adapter(run, output, expected)
