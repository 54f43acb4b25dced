"""Updates of an engine's weights: what they replace (the model or an adapter), their state, and the ranks' answers."""

import json
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from importlib import import_module
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.hugging_face.files import Adapter
from slime_like.config import ModelConfig
from slime_like.errors import EngineError, WeightSyncError
from slime_like.hosting.faults import code_of, one_line
from slime_like.interfaces import BucketMetadata, Manifest, TensorEntry, UpdateReceipt
from slime_like.interfaces.weights import MODEL
from slime_like.system.profiler import profile_process
from slime_like.weights.adapter import module_ends
from slime_like.weights.expected_tensors import expected_factors
from slime_like.weights.received import WeightReceiver

Call = Callable[..., Awaitable[Any]]
Shapes = dict[str, tuple[int, ...]]

_MIXED = "has mixed weights since"


class UpdateTarget:
    """Part of an engine that updates replace. ``EngineBase`` calls the methods after its checks.

    Attributes:
        expected: name and shape of every tensor of an update.
    """

    expected: Mapping[str, tuple[int, ...]]

    async def _serve_initial(self) -> None:
        """Serve what belongs to version 0, in a started engine."""

    async def _begin_update(self) -> None:
        """Start an update, even if the last one failed and is still open."""
        raise NotImplementedError

    async def _update(self, bucket: BucketMetadata) -> None:
        """Fetch, hash and load a checked bucket. If this raises, the update has failed."""
        raise NotImplementedError

    async def _finish_update(self, version: int) -> None:
        """Serve the complete update, and flush every cache."""
        raise NotImplementedError


class AdapterTarget(UpdateTarget):
    """The adapter of an engine: low-rank factors, received like weights and applied to every request.

    The base stays as loaded. Ranks keep the factors in ``WeightReceiver.kept`` until all have arrived.

    Args:
        ranks: ``EngineBase._receive``.
        serve: name of a function (``function_of``). It gets PEFT's settings, and the arguments of ``take_factors``.
        finish: ``_finish_update`` of the engine, which has no update of its own open.
    """

    def __init__(self, model: ModelConfig, ranks: Call, serve: str, finish: Call) -> None:
        self.expected, lora = expected_factors(model), model.lora
        modules, path = module_ends(self.expected), None if lora.path is None else str(lora.path)
        settings: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
        settings |= {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": modules}
        self._ranks, self._finish = ranks, finish
        self._serve = partial(ranks, serve, settings, path, self.expected)

    async def _serve_initial(self) -> None:
        await self._serve()

    async def _begin_update(self) -> None:
        await self._ranks("begin_update")

    async def _update(self, bucket: BucketMetadata) -> None:
        await self._ranks("keep", bucket.to_wire())

    async def _finish_update(self, version: int) -> None:
        await self._serve()
        await self._finish(version)


def take_factors(receiver: WeightReceiver, path: str | None, shapes: Shapes) -> dict[str, Tensor]:
    """Take the received factors out of ``kept``.

    Before the first update, read the PEFT adapter ``path``; without one, the factors are 0.
    """
    kept, receiver.kept = receiver.kept, {}
    if kept or path is None:
        return kept or {name: torch.zeros(tuple(shape)) for name, shape in shapes.items()}
    with Adapter(Path(path), {name: tuple(shape) for name, shape in shapes.items()}) as adapter:
        return {name: adapter.read_whole(name) for name in shapes}


class WeightUpdateState:
    """Bookkeeping of begin, update and finish. Does not hold weights.

    After a failed update, the weights are a mixture of two versions. After a sleep without weights, there are none.
    Nothing may be sampled until the next update is finished. A check that raises also fails the open update.

    Args:
        targets: name and shape of every tensor that the manifest of an update must have, by what it updates.
    """

    def __init__(self, engine: str, targets: Mapping[str, Mapping[str, tuple[int, ...]]]) -> None:
        self.version = 0
        self._engine = engine
        self._targets = targets
        self._manifest = Manifest({})
        self._open_version: int | None = None
        self._failure: str | None = None

    def require_serving(self) -> None:
        """Raise ``EngineError`` unless all weights have the same version."""
        if self._failure is not None:
            problem, remedy = f"{self._engine} {self._failure}", "finish a complete weight update before sampling"
            raise EngineError(problem, code="mixed-weights", remedy=remedy)

    @property
    def is_whole(self) -> bool:
        """True if all weights have the same version, and no update is open."""
        return self._failure is None

    def forget(self, reason: str) -> None:
        self._failure = reason
        self._open_version = None

    def begin(self, version: int, manifest: Manifest) -> None:
        """Open an update, and compare its manifest with its target. A tensor that is missing would stay stale."""
        was_whole, self._open_version = self.is_whole, version
        # An open update counts as failed until it is finished, so nothing is sampled whatever happens in between.
        self._failure = f"{_MIXED} the update to version {version} did not finish"
        if manifest.updates not in self._targets:
            known = ", ".join(self._targets)
            raise self._rejection(f"it cannot update {manifest.updates}, only {known}", "update-target")
        if manifest.updates != MODEL and MODEL in self._targets and not was_whole:
            problem = f"it cannot update {manifest.updates} before the {MODEL}, which is not whole"
            raise self._rejection(problem, "update-target")
        with self._failing():
            require_model(manifest, self._targets[manifest.updates], self._engine)
        self._manifest = manifest

    def check_bucket(self, entries: Sequence[TensorEntry]) -> None:
        """Reject tensors that the manifest does not have, or has with another type or shape."""
        self._require_open("update")
        for entry in entries:
            info = self._manifest.tensors.get(entry.name)
            if info is None:
                raise self._rejection(f"the update's manifest has no tensor {entry.name}", "unknown-tensor")
            if (info.dtype, info.shape) != (entry.dtype, entry.shape):
                found = f"{entry.name} is {entry.dtype} {entry.shape}"
                raise self._rejection(f"{found}, but the manifest has {info.dtype} {info.shape}", "tensor-shape")

    def check_complete(self, version: int, received: Mapping[str, int]) -> None:
        self._require_open("finish_update")
        if version != self._open_version:
            raise self._rejection(f"version {self._open_version} is open, not {version}", "other-version-open")
        with self._failing():
            require_complete(received, self._manifest.tensors, self._engine)

    def commit(self, received: Mapping[str, int], hash_s: float = 0.0) -> UpdateReceipt:
        assert self._open_version is not None
        self.version = self._open_version
        self._open_version = None
        self._failure = None
        return UpdateReceipt(self.version, dict(received), hash_s)

    def fail(self, reason: str) -> None:
        """Mark the open update, if any, as failed. The engine then refuses to sample."""
        if self._open_version is not None:
            self._failure = f"{_MIXED} the update to version {self._open_version} failed ({reason})"
        self._open_version = None

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except WeightSyncError as error:
            self.fail(str(error))
            raise

    def _require_open(self, call: str) -> None:
        if self._open_version is None:
            raise self._rejection(f"{call} without an open update", "no-open-update", "call begin_update first")

    def _rejection(self, problem: str, code: str, remedy: str = "") -> WeightSyncError:
        error = WeightSyncError(problem, code=code, who=self._engine, remedy=remedy)
        self.fail(str(error))
        return error


def require_model(manifest: Manifest, model: Mapping[str, tuple[int, ...]], engine: str) -> None:
    """Reject the manifest of an update of the whole model that lacks tensors, or has unknown or misshapen ones."""
    expected = {f"{name} {shape}" for name, shape in model.items()}
    require_complete({f"{name} {info.shape}" for name, info in manifest.tensors.items()}, expected, engine)


def require_complete(received: Collection[str], expected: Collection[str], engine: str) -> None:
    """Reject an update that lacks tensors or contains unknown ones.

    Raises:
        WeightSyncError: names the first few tensors.
    """
    missing = sorted(set(expected) - set(received))
    unknown = sorted(set(received) - set(expected))
    problems = [
        f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for kind, names in (("missing", missing), ("unknown", unknown))
        if names
    ]
    if problems:
        problem = f"weight update of {engine} is incomplete: {' and '.join(problems)}"
        remedy = "send all buckets, with Hugging Face names, before the update is finished"
        raise WeightSyncError(problem, code="incomplete-update", remedy=remedy)


# --------------------------------------------------------------------------------- calls of all ranks
RankAnswer: TypeAlias = tuple[Any, str | None, str]
"""A result, or ``None`` with the error's message and code. Plain values, because every engine's RPC carries those."""

AnswerQueue: TypeAlias = "SimpleQueue[RankAnswer] | StoreQueue"


class StoreQueue:
    """Queue of answers in the store of an engine that spans nodes. Every process connects when it first uses it."""

    def __init__(self, host: str, port: int) -> None:
        self._place = host, port
        self._read = 0

    @cached_property
    def _store(self) -> dist.Store:
        return dist.PrefixStore("answers", dist.TCPStore(*self._place, is_master=False, wait_for_workers=False))

    def put(self, answer: RankAnswer) -> None:
        self._store.set(str(self._store.add("count", 1)), json.dumps(answer))

    def get(self) -> RankAnswer:
        """Wait for the next answer, within the store's timeout."""
        self._read += 1
        result, failure, code = json.loads(self._store.get(str(self._read)))
        self._store.delete_key(str(self._read))
        return result, failure, code

    def empty(self) -> bool:
        return not self._store.check([str(self._read + 1)])


def attempt(call: Callable[[], Any]) -> RankAnswer:
    """Run one rank's part of a call. Return errors as answers, because engines pass on only the first rank's."""
    try:
        return call(), None, ""
    except Exception as error:
        return None, one_line(error), code_of(error, "rank-failed")


def function_of(rank: Any, name: str) -> Callable[..., Any]:
    """Return a method of ``rank.receiver``, or the function "MODULE:NAME" in the package ``rollout``, applied to
    ``rank``."""
    module, _, function = name.rpartition(":")
    if not module:
        return cast("Callable[..., Any]", getattr(rank.receiver, name))
    return partial(getattr(import_module(f"rollout.{module}"), function), rank)


def profile(_: object, path: str | None, memory: bool) -> None:
    """Start to trace this rank's process, or write its trace to ``path`` and the rank's number."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    profile_process(path and f"{path}-rank-{rank}", memory)


def results(answers: Sequence[RankAnswer]) -> list[Any]:
    """Return every rank's result. Raises ``WeightSyncError`` with the first failure."""
    for _, failure, code in answers:
        if failure is not None:
            raise WeightSyncError(failure, code=code)
    return [result for result, _, _ in answers]


def common_checksums(received: Sequence[tuple[dict[str, int], float]]) -> tuple[dict[str, int], float]:
    """Return the ranks' hashes, and the longest hashing time. Raises ``WeightSyncError`` if the hashes differ."""
    first, _ = received[0]
    if any(checksums != first for checksums, _ in received):
        raise WeightSyncError("tensor-parallel ranks received different bytes", code="ranks-differ")
    return first, max(hash_s for _, hash_s in received)
