"""A new tensor per token is one line: the packages are copied, lines are added, and everything carries the fields.

What this does not cover: the engine or trainer that would fill the field, and the loss that would read it.
"""

import importlib
import json
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import slime_like

SOURCES = Path(slime_like.__file__).parent
WRITTEN_BEFORE = Path(__file__).parent / "data" / "dumps" / "version-1.pt"
LENGTHS = (4, 1, 6)


@dataclass(frozen=True)
class NewField:
    """A field of ``owner``; ``wrong`` are of another type or shape."""

    owner: str
    name: str
    description: str
    of_length: Callable[[int], Tensor]
    wrong: tuple[Callable[[int], Tensor], ...]

    @property
    def line(self) -> str:
        return f"    {self.name}: Tensor | None = field(default=None, metadata=_tensor({self.description}))\n"


_FIELDS = [
    NewField(
        "SampledFields", "sampling_mask", "torch.bool, optional=True", lambda n: torch.arange(n) % 3 == 0, (torch.ones,)
    ),
    NewField(
        "ScoredFields", "values", "torch.float32, optional=True",
        lambda n: torch.arange(n) / 8, (lambda n: torch.zeros(n, dtype=torch.complex64),),
    ),
    NewField(
        "ScoredFields", "tracks", "torch.int64, optional=True, entry_ndim=2",
        lambda n: torch.arange(6 * n).view(n, 2, 3),
        (lambda n: torch.zeros(n, 2, 3), lambda n: torch.zeros(n, 2, 2, dtype=torch.int64)),
    ),
    NewField(
        "SampledFields", "layers", 'torch.int64, optional=True, over="inputs", entry_ndim=1',
        lambda n: torch.arange(4 * n).view(2 * n, 2),
        (lambda n: torch.zeros(2 * n, 2), lambda n: torch.zeros(n, 2, dtype=torch.int64)),
    ),
    NewField(
        "SampledFields", "marks", 'torch.int64, optional=True, over="prompt"',
        lambda n: torch.arange(n + 1), (lambda n: torch.zeros(n + 1), lambda n: torch.arange(n)),
    ),
]  # fmt: skip
FIELDS = {each.name: each for each in _FIELDS}


@dataclass(frozen=True)
class Copy:
    """The modules of the copied packages, and one of the fields that they have in addition."""

    field: NewField
    algorithms: ModuleType
    trajectory: ModuleType
    dump: ModuleType
    transfer: ModuleType

    def sequences(self, with_field: bool = True) -> list[Any]:
        made = []
        for i, n in enumerate(LENGTHS):
            given = {self.field.name: self.field.of_length(n)} if with_field else {}
            new = self.trajectory.ScoredTrajectory.unrewarded
            made.append(replace(new(f"s{i}", torch.arange(1, n + 2), torch.arange(n)), **given))
        return made

    def of(self, carrier: object) -> Any:
        return getattr(carrier, self.field.name)


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ModuleType]]:
    """Copy the packages, add the line of every field, and import the copies instead of the packages."""
    root = tmp_path_factory.mktemp("copies")
    for package in (SOURCES, SOURCES.parent / "backends"):
        shutil.copytree(package, root / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    file, slots = root / "slime_like" / "trajectory.py", "    __slots__ = ()\n"
    for field in FIELDS.values():
        before, owner, after = file.read_text().partition(f"class {field.owner}:")
        assert owner
        file.write_text(before + owner + after.replace(slots, slots + field.line, 1))
    with pytest.MonkeyPatch.context() as patch:
        for name in _loaded():
            patch.delitem(sys.modules, name)
        patch.syspath_prepend(root)
        found = [_slime_like(name) for name in ("algorithms", "trajectory", "data.dump")]
        found.append(importlib.import_module("backends.common.step.packs"))
        assert all(str(module.__file__).startswith(str(root)) for module in found)
        yield found
        for name in _loaded():  # the copies; those from before come back
            del sys.modules[name]


@pytest.fixture(params=FIELDS.values(), ids=FIELDS.keys())
def copy(request: pytest.FixtureRequest, modules: list[ModuleType]) -> Copy:
    return Copy(request.param, *modules)


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in ("slime_like", "backends", "rollout")]


def test_the_field_goes_all_the_way(copy: Copy, tmp_path: Path) -> None:
    sequences = copy.sequences()
    pack = copy.algorithms.pack_sequences(sequences, target_tokens_per_batch=32)
    whole = torch.cat([copy.of(s) for s in sequences])
    assert copy.of(pack).dtype == whole.dtype and torch.equal(copy.of(pack), whole)

    received = pickle.loads(pickle.dumps(pack))
    assert torch.equal(copy.of(received), whole)
    assert copy.of(copy.transfer.on_device(pack, torch.device("meta"))).device.type == "meta"
    filler = copy.algorithms.zero_weight_pack(pack)
    assert torch.equal(copy.of(filler), copy.of(sequences[0]))

    if "over=" not in copy.field.description:
        shards = [copy.algorithms.split_for_context_parallel(pack, 2, rank) for rank in range(2)]
        parts = [shard.scatter(copy.of(pack)[shard.response_slot]) for shard in shards]
        assert torch.equal(parts[0] + parts[1], whole)

    path = tmp_path / "rollouts.pt"
    copy.dump.save_trajectories(path, copy.algorithms.unpack_sequences(received))
    for loaded, sequence in zip(copy.dump.load_trajectories(path), sequences, strict=True):
        assert torch.equal(copy.of(loaded), copy.of(sequence))


@pytest.mark.parametrize("copy", [FIELDS["marks"]], indirect=True)
def test_a_field_of_a_prompt_goes_from_its_row_to_the_pack(
    copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also through a checkpoint, and for demonstrations. An engine that does not use it rejects the request."""
    encoding, data, interfaces = (_slime_like(name) for name in ("data.encoding", "data.prompts", "interfaces"))
    store, requests, sources = (
        _slime_like(f"orchestration.{name}") for name in ("rollout.issue", "rollout.requests", "run.stored_sources")
    )
    check = importlib.import_module("rollout.requests").check_request
    usual = encoding.RowEncoder.encode_all

    def marked(encoder: Any, rows: Any) -> Any:
        each = usual(encoder, rows)
        marks = [7 * np.arange(len(found.input.token_ids), dtype=np.int32) for found in each]
        return [
            replace(found, input=replace(found.input, fields={"marks": own}))
            for found, own in zip(each, marks, strict=True)
        ]

    monkeypatch.setattr(encoding.RowEncoder, "encode_all", marked)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": p, "response": "x"}) + "\n" for p in ("a", "bcd"))
    )
    config = _slime_like("config").DataConfig(shuffle=False, apply_chat_template=False)
    source = data.PromptSource(
        [tmp_path / "rows.jsonl"], _slime_like("examples.tiny_model").byte_tokenizer(), config, 0, True
    )
    rows = sources.Demonstrations(source, 2).next_batch(1, _slime_like("observability.timing").PhaseClock())
    expected = [0, 0, 7, 14]
    assert copy.algorithms.pack_sequences(rows).marks.tolist() == expected

    prompts = [store._prompt(fields) for fields in json.loads(json.dumps(list(map(store._fields, source.next(2)))))]
    assert [prompt.input.fields["marks"].dtype for prompt in prompts] == [np.int32] * 2
    asked = requests.build_requests(prompts, interfaces.SamplingParams(max_new_tokens=1), 1, seed=0, label="r")
    for request in asked:
        check(request, SimpleNamespace(vocab_size=264), 8, prompt_fields=("marks",))
        with pytest.raises(_slime_like("errors").EngineError, match="does not use the prompt's marks") as caught:
            check(request, SimpleNamespace(vocab_size=264), 8)
        assert caught.value.code == "bad-request"
    answer = interfaces.Generation(np.array([5]), np.zeros(1), np.zeros(1), "length")
    groups = [requests.to_group(prompt, [answer], 1.0) for prompt in prompts]
    pack = copy.algorithms.pack_sequences([row for group in groups for row in group.trajectories])
    assert pack.marks.dtype == torch.int64 and pack.marks.tolist() == expected


def _slime_like(name: str) -> ModuleType:
    return importlib.import_module(f"slime_like.{name}")


def test_an_absent_field_stays_absent(copy: Copy, tmp_path: Path) -> None:
    """It is absent from a dump of before the field, too."""
    pack = copy.algorithms.pack_sequences(copy.sequences(with_field=False))
    assert copy.of(pack) is None and copy.of(copy.algorithms.zero_weight_pack(pack)) is None
    path = tmp_path / "rollouts.pt"
    copy.dump.save_trajectories(path, copy.algorithms.unpack_sequences(pack))
    for file, count in ((path, len(LENGTHS)), (WRITTEN_BEFORE, 2)):
        assert [copy.of(loaded) for loaded in copy.dump.load_trajectories(file)] == [None] * count


@pytest.mark.parametrize("copy", [FIELDS["sampling_mask"]], indirect=True)
def test_scoring_keeps_what_was_sampled(copy: Copy) -> None:
    scored = copy.sequences()[0]
    shared = {name: getattr(scored, name) for name in copy.trajectory.UnscoredTrajectory.__dataclass_fields__}
    sample = copy.trajectory.UnscoredTrajectory(**shared)
    again = copy.algorithms.unpack_sequences(copy.algorithms.pack_sequences([sample]))[0]
    scores = {"rewards": torch.ones(1), "successes": torch.ones(1), "advantages": torch.tensor(0.5)}
    made = copy.trajectory.ScoredTrajectory.of(again, **scores, reward_metadata={}, ref_logprobs=None)
    assert torch.equal(copy.of(made), copy.of(scored))


def test_wrong_values_are_named(copy: Copy) -> None:
    field = copy.field
    for value in (*(wrong(1) for wrong in field.wrong), field.of_length(2), field.of_length(1)[None], None):
        sequences = copy.sequences()
        sequences[1] = replace(sequences[1], **{field.name: value})
        with pytest.raises(ValueError, match=field.name):
            copy.algorithms.pack_sequences(sequences)


@pytest.mark.parametrize("copy", [FIELDS["values"]], indirect=True)
def test_a_number_that_is_not_finite_needs_a_masked_token(copy: Copy) -> None:
    sequence = replace(copy.sequences()[0], values=torch.tensor([0.0, float("nan"), 0.0, 0.0]))
    with pytest.raises(ValueError, match="which carries loss; drop the sequence, or set"):
        copy.algorithms.pack_sequences([sequence])
    masked = replace(sequence, loss_mask=torch.tensor([True, False, True, True]))
    assert copy.of(copy.algorithms.pack_sequences([masked])).isnan().tolist() == [False, True, False, False]
