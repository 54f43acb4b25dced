"""Two checkpoints of one model, their Hugging Face references, and one started engine of each kind per module."""

import getpass
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from rollout.sglang.engine import SglangEngine
from rollout.transformers.engine import TransformersEngine
from rollout.vllm.engine import VllmEngine
from slime_like.examples.tiny_model import make_tiny_model
from tests.engines.harness import PRECISION, RARE_ID, EngineUnderTest, ReferenceModel, run_config, started

ENGINES = {"vllm": VllmEngine, "sglang": SglangEngine, "transformers": TransformersEngine}
EOS_IDS = list(range(200, 230))
"""Many, so a random model samples one soon."""


@pytest.fixture(scope="module", autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove sockets and files that engines leave behind. In a run, they are removed with Ray's session."""
    tmp_path_factory.getbasetemp()  # keeps pytest's own directory
    usual = tempfile.gettempdir()
    with (
        tempfile.TemporaryDirectory(prefix="engines-", ignore_cleanup_errors=True) as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{usual}/torchinductor_{getpass.getuser()}")  # keeps the cache
        patch.setenv("TMPDIR", directory)
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [_make_model(root / f"model{seed}", seed) for seed in (0, 1)]


@pytest.fixture(scope="session")
def references(models: list[Path]) -> list[ReferenceModel]:
    return [ReferenceModel(model, PRECISION) for model in models]


@pytest.fixture(scope="module", params=list(ENGINES))
def engine(
    request: pytest.FixtureRequest, references: list[ReferenceModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineUnderTest]:
    config = run_config(references[0].directory, tmp_path_factory.mktemp("run"), dtype=PRECISION)
    with started(ENGINES[request.param](config, 0), references) as under_test:
        yield under_test


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Sixteen prompts of 3 to 60 tokens, including EOS ids."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, 250, length).tolist() for length in generator.integers(3, 60, 16)]


def _make_model(directory: Path, seed: int) -> Path:
    make_tiny_model(directory, family="qwen3", seed=seed, num_hidden_layers=2, max_position_embeddings=1024)
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"][RARE_ID] = 0
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    generation = directory / "generation_config.json"
    generation.write_text(json.dumps({**json.loads(generation.read_text()), "eos_token_id": EOS_IDS}))
    return directory
