"""Claims that an engine must satisfy before it can be used in training. transformers' forward pass is the reference.

Each claim is a function that checks it. ``slime-like verify engine``, which prints its docstring, and the tests of
engines run the same list.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_like.config import RunConfig
from slime_like.errors import EngineError, SlimeLikeError, WeightSyncError
from slime_like.interfaces import Manifest, load_engine
from slime_like.models.dimensions import ModelDimensions
from slime_like.verification.engine.interruptions import (
    interrupted_requests,
    routes,
    routes_amid_update,
    update_while_generating,
)
from slime_like.verification.engine.subject import (
    COLD,
    TOKENS,
    ClaimFailed,
    DrivenEngine,
    ReferenceModel,
    Subject,
    start_engine,
)

_MOVES = {"float32": 1e-2, "bfloat16": 0.33}
"""Minimum ``Reference.gap`` of the most affected logprobs before and after a tensor's change."""
_FOLLOWS = 0.02
"""Share of this gap by which engine and reference may differ afterwards, because changed weights round differently."""
_PROMPTS = 8
LONGEST_PROMPT, LONGEST_RESPONSE = 64, 256
"""Maximum tokens of the engine's prompts and responses."""
_DRAWS = 8

_CUTS = ((0.9, 40, 0.0), (1.0, 5, 0.0), (0.5, 512, 0.0), (0.9, 40, 0.2))
"""top_p, top_k and min_p."""


def _bounded(subject: Subject, gap: float, what: str) -> float:
    if gap > subject.reference.bound:
        raise ClaimFailed(f"{what} differ by {gap:.1e} (bound {subject.reference.bound:.1e})")
    return gap


def sampled_logprobs(subject: Subject) -> float:
    """Logprobs of sampled tokens come from temperature-scaled logits, with several temperatures in one batch."""
    asked = [(prompt, temperature) for prompt in subject.prompts for temperature in (1.0, 0.7, 0.0)]
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "num_samples": 2, "ignore_eos": True}
    requests = [subject.engine.request(prompt, temperature=value, **options) for prompt, value in asked]
    answers = zip(asked, subject.engine.generate_all(requests), strict=True)
    gaps = [subject.gap(prompt, each, value) for (prompt, value), answer in answers for each in answer]
    return _bounded(subject, max(gaps), "logprobs")


def prompt_logprobs(subject: Subject) -> float:
    """Logprobs of a prompt's tokens equal logprobs under teacher forcing."""
    return _bounded(subject, subject.probe(), "logprobs of prompts")


def greedy(subject: Subject) -> float:
    """Temperature 0 selects the most likely token."""
    prompt = subject.prompts[0]
    (generation,) = subject.engine.generate(prompt, temperature=0.0, max_new_tokens=TOKENS)
    logits = subject.reference.logits(prompt, generation.token_ids.tolist())[:-1]
    chosen = logits.gather(1, torch.from_numpy(generation.token_ids)[:, None])[:, 0]
    gap = subject.reference.gap(chosen.numpy(), logits.max(dim=-1).values.numpy())
    return _bounded(subject, gap, "logits of greedy tokens and the largest")


def seeds(subject: Subject) -> None:
    """A seed gives the same samples with and without concurrent requests; other seeds and no seed give others."""

    def drawn(seed: int | None, samples: int, crowded: bool = False) -> list[tuple[int, ...]]:
        # Rounding depends on the batch. At a higher temperature it would often decide between similarly likely tokens.
        options: dict[str, Any] = {"max_new_tokens": TOKENS, "temperature": 0.3, "ignore_eos": True}
        requests = [subject.engine.request(subject.prompts[1], seed=seed, num_samples=samples, **options)]
        requests += [subject.engine.request(prompt, max_new_tokens=TOKENS) for prompt in subject.prompts if crowded]
        return [tuple(each.token_ids.tolist()) for each in subject.engine.generate_all(requests)[0]]

    alone, crowd = drawn(7, 8), drawn(7, 10, crowded=True)
    if not subject.reference.is_alike(list(zip(alone, crowd, strict=False))):
        raise ClaimFailed("the same seed gave other tokens during other requests")
    if len({*crowd, *drawn(8, 2), *drawn(None, 1), *drawn(None, 1)}) < 14:
        raise ClaimFailed("two samples of a request, of two seeds, or of requests without a seed are equal")


def unknown_fields(subject: Subject) -> None:
    """A prompt with a field that the engine does not use is rejected."""
    prompt = subject.prompts[0]
    with _rejected(EngineError, "a prompt with the field no_such_field was accepted"):
        subject.engine.generate(prompt, max_new_tokens=1, prompt_fields={"no_such_field": np.zeros(len(prompt))})


def stop_tokens(subject: Subject) -> None:
    """A stop token ends a response and is part of it."""
    prompt = subject.prompts[2]
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}
    pairs = []
    for seed in range(_DRAWS):
        (free,) = subject.engine.generate(prompt, seed=seed, **options)
        ids = free.token_ids.tolist()
        stop = ids[len(ids) // 2]
        (ended,) = subject.engine.generate(prompt, seed=seed, stop_token_ids=(stop,), **options)
        found = ended.token_ids.tolist()
        end = (found.index(stop) + 1, "stop") if stop in found else (TOKENS, "length")
        if (len(found), ended.finish_reason) != end:
            raise ClaimFailed(f"sampled {found} ({ended.finish_reason}) although {stop} should end the response")
        pairs.append((found, ids[: ids.index(stop) + 1]))
    if not subject.reference.is_alike(pairs):
        raise ClaimFailed("a stop token changed the tokens in front of it")


def truncated_sampling(subject: Subject) -> float | None:
    """Supports are the smallest sets that top-p, top-k and min-p allow, logprobs are over them, and evaluation samples
    the same tokens."""
    if not getattr(subject.engine.engine, "returns_supports", False):
        return None
    gaps, pairs, prompt = [0.0], [], subject.prompts[3 % len(subject.prompts)]
    for top_p, top_k, min_p in _CUTS:
        options: dict[str, Any] = {"top_p": top_p, "top_k": top_k, "min_p": min_p, "temperature": 0.7, "seed": 4}
        options |= {"max_new_tokens": TOKENS, "ignore_eos": True}
        (generation,) = subject.engine.generate(prompt, **options)
        (evaluated,) = subject.engine.generate(prompt, training=False, **options)
        pairs.append((generation.token_ids.tolist(), evaluated.token_ids.tolist()))
        if generation.supports is None:
            raise ClaimFailed("no supports were returned")
        logits = subject.reference.logits(prompt, generation.token_ids.tolist())[:-1].double() / 0.7
        tokens = zip(logits, generation.supports, generation.token_ids, strict=True)
        expected, edges = np.array([_over_support(*each, top_p, top_k, min_p) for each in tokens]).T
        compared = ((generation.logprobs, expected), (edges, np.zeros_like(edges)))
        gaps += [subject.reference.gap(found, right, temperature=0.7) for found, right in compared]
    if not subject.reference.is_alike(pairs):
        raise ClaimFailed("evaluation sampled other tokens with the same seed")
    return _bounded(subject, max(gaps), "logprobs over supports, or at their edges,")


def _over_support(
    logits: Tensor, support: np.ndarray, token: int, top_p: float, top_k: int, min_p: float
) -> tuple[float, float]:
    """Return the token's logprob over its support, and the support's error: the distance in logits by which its least
    likely token, or the most likely token outside, is on the wrong side of the cut's edge."""
    likeliest = logits.softmax(0).sort(descending=True)
    mass = likeliest.values[likeliest.values >= min_p * likeliest.values[0]][:top_k]
    count = 1 + int(((mass / mass.sum()).cumsum(0) < top_p).sum()) if top_p < 1 else len(mass)
    kept = support.tolist()
    if token not in kept:
        raise ClaimFailed(f"token {token} was sampled from {kept[:20]}")
    logprob = float(logits[token] - logits[kept].logsumexp(0))
    if abs(len(kept) - count) <= 1 and set(kept) <= set(likeliest.indices[: count + 1].tolist()):
        return logprob, 0.0  # a token at the edge may round to either side
    edge, left_out = logits[likeliest.indices[count - 1]], logits.index_fill(0, torch.tensor(kept), -np.inf)
    return logprob, float(max(left_out.max() - edge, edge - logits[kept].min()))


def abort_and_pause(subject: Subject) -> float:
    """An aborted request returns its tokens so far, and a frozen one next to a canceled one resumes."""
    gap = max(subject.gap(prompt, generation, COLD) for prompt, generation in interrupted_requests(subject))
    return _bounded(subject, gap, "logprobs after abort or pause")


def idle_update(subject: Subject) -> float:
    """After an update, logprobs (also of cached prefixes), version and hashes match the new weights."""
    subject.probe()  # fills caches
    engine = subject.engine
    receipt, sent = engine.run(engine.update(subject.others))
    subject.swap()
    health = engine.run(engine.engine.health())
    if receipt.checksums != sent:
        raise ClaimFailed("the hashes of the engine's tensors differ from those of the sent tensors")
    (generation,) = engine.generate(subject.prompts[0], max_new_tokens=4)
    versions = {receipt.version, health.weight_version, *generation.weight_versions.tolist()}
    if versions != {engine.version}:
        raise ClaimFailed(f"after update {engine.version} the engine reports the versions {sorted(versions)}")
    return _bounded(subject, subject.probe(), "logprobs after an update")


def update_amid_requests(subject: Subject) -> float:
    """Tokens before an update use the old weights and later tokens the new ones, as their versions say, whether or not
    the caller pauses the engine."""
    gaps = []
    for pauses in (False, True):
        prompt, generation, before = update_while_generating(subject, pauses)
        new = subject.reference.logprobs(prompt, generation.token_ids, COLD)
        subject.swap()
        old = subject.reference.logprobs(prompt, generation.token_ids, COLD)
        subject.swap()
        gaps += [subject.reference.gap(generation.logprobs[:before], old[:before], COLD)]
        gaps += [subject.reference.gap(generation.logprobs[before:], new[before:], COLD)]
    return _bounded(subject, max(gaps), "logprobs around an update")


def every_tensor(subject: Subject) -> float:
    """A change of any single tensor changes the engine's logprobs in the same way as the reference's."""
    base, ignored, idle = dict(subject.reference.weights), [], []
    before = _expected(subject)
    for number, name in enumerate(base):
        changed, moved, where = _perturbed(subject, name, base, before, seed=number)
        if changed is None:
            idle.append(name)
            continue
        subject.load({**base, name: changed})
        gap = subject.probe(where)
        if gap > max(subject.reference.bound, _FOLLOWS * moved):
            ignored.append(f"{name} ({gap:.1e} of {moved:.1e})")
    subject.load(base)
    if ignored:
        raise ClaimFailed(f"updates of {len(ignored)} of {len(base)} tensors have no effect: {', '.join(ignored)}")
    if idle:
        raise ClaimFailed(f"{len(idle)} tensors could not be tested, because they change no logprob: {', '.join(idle)}")
    return _bounded(subject, subject.probe(), "logprobs after all changes were reverted")


def _perturbed(
    subject: Subject, name: str, base: dict[str, Tensor], before: np.ndarray, seed: int
) -> tuple[Tensor | None, float, np.ndarray]:
    """Return the tensor with noise that changes the reference's logprobs enough (``None``: no noise does), the gap, and
    a mask (n,) of the most affected tokens."""
    tensor, generator = base[name], torch.Generator().manual_seed(seed)
    scale = max(float(tensor.float().std(correction=0)), 0.1)
    for draw in range(_DRAWS):
        noise = torch.randn(tensor.shape, generator=generator) * scale * 2.0 ** (draw - 1)
        changed = (tensor.float() + noise).to(tensor.dtype)
        subject.reference.use({**base, name: changed})
        after = _expected(subject)
        where = np.abs(after - before) >= np.sort(np.abs(after - before))[-TOKENS:][0]
        moved = subject.reference.gap(after[where], before[where])
        if moved > _MOVES[subject.reference.dtype]:
            return changed, moved, where
    return None, moved, where


def _expected(subject: Subject) -> np.ndarray:
    parts = [subject.reference.logprobs(prompt[:1], np.asarray(prompt[1:]), 1.0) for prompt in subject.prompts]
    return np.concatenate(parts)


def broken_updates(subject: Subject) -> float:
    """An update with a missing, damaged, unknown or misshapen tensor is rejected, and sampling needs a whole one."""
    weights = dict(subject.reference.weights)
    name, tensor = next(reversed(weights.items()))
    faults: dict[str, dict[str, Tensor]] = {
        f"without {name}": {n: t for n, t in weights.items() if n != name},
        "with an unknown tensor": {**weights, "model.no_such.weight": torch.zeros(4)},
        f"with {name} of another shape": {**weights, name: tensor[..., :-1].contiguous()},
        "with a damaged tensor": weights,
    }
    # The transfer differs from the manifest, or the manifest from the model.
    for (what, sent), exported in itertools.product(faults.items(), (weights, None)):
        tamper = subject.engine.flip_a_bit if sent is weights else None
        with _rejected(WeightSyncError, f"an update {what} was accepted"):
            subject.engine.run(subject.engine.update(sent, tamper=tamper, manifest=Manifest.of(exported or sent)))
        with _rejected(EngineError, f"the engine sampled after an update {what}"):
            subject.engine.generate(subject.prompts[0], max_new_tokens=1)
        subject.load(weights)
    return _bounded(subject, subject.probe(), "logprobs after rejected updates")


@contextlib.contextmanager
def _rejected(error: type[Exception], otherwise: str) -> Iterator[None]:
    """Fail the claim with ``otherwise`` unless the block raises ``error``."""
    with contextlib.suppress(error):
        yield
        raise ClaimFailed(otherwise)


def sleep_and_wake(subject: Subject) -> float:
    """After sleep, with kept weights and with new ones, the engine computes as before."""
    engine = subject.engine

    async def nap(keep_weights: bool) -> None:
        await engine.engine.sleep(keep_weights=keep_weights)
        await engine.engine.wake(("weights",))
        if not keep_weights:
            await engine.update(subject.reference.weights)
        await engine.engine.wake(("kv_cache",))
        await engine.engine.resume()

    gaps = []
    for keep_weights in (True, False):
        engine.run(nap(keep_weights))
        gaps.append(subject.probe())
    return _bounded(subject, max(gaps), "logprobs after sleeping")


Claim = Callable[[Subject], float | None]
CLAIMS: Sequence[Claim] = (
    sampled_logprobs,
    prompt_logprobs,
    greedy,
    seeds,
    stop_tokens,
    unknown_fields,
    truncated_sampling,
    abort_and_pause,
    idle_update,
    update_amid_requests,
    every_tensor,
    broken_updates,
    sleep_and_wake,
    routes,
    routes_amid_update,
)
"""In this order; some change the weights that the engine serves."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one claim.

    Attributes:
        claim: the claim as a sentence.
        gap: ``Reference.gap``; ``None`` if the claim does not measure one.
        problem: why the claim does not hold; ``None`` if it does.
    """

    claim: str
    gap: float | None
    seconds: float
    problem: str | None = None


def verify_engine(config: RunConfig) -> Iterator[Verdict]:
    """Check each claim in turn on one engine of ``config`` in this process.

    Args:
        config: configuration of the engine, with a small model in one file.

    Raises ``SlimeLikeError`` if the engine does not start.
    """
    kind = load_engine(config.rollout.engine)
    dimensions = ModelDimensions.from_checkpoint(config.model.path)
    routed = dimensions.num_experts > 0 and getattr(kind, "returns_routes", False)
    if routed:
        algorithm = config.algorithm.model_copy(update={"routing_replay": "rollout"})
        config = config.model_copy(update={"algorithm": algorithm})
    engine = kind(config, 0)
    with start_engine(engine) as loop:
        driven = DrivenEngine(engine, loop)
        try:
            reference = ReferenceModel(config.model.path, config.model.dtype)
            subject = Subject(driven, reference, _others(reference.weights), _prompts(config.model.path), routed)
            yield from (_tried(claim, subject) for claim in CLAIMS)
        finally:
            driven.close()


def _tried(claim: Claim, subject: Subject) -> Verdict:
    sentence = " ".join((claim.__doc__ or "").split())
    began, gap, problem = time.monotonic(), None, None
    try:
        gap = claim(subject)
    except ClaimFailed as refuted:
        problem = str(refuted)
    except (SlimeLikeError, TimeoutError) as error:  # other claims may still hold
        problem = f"{type(error).__name__}: {error}"
    return Verdict(sentence, gap, time.monotonic() - began, problem)


def _others(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with noise of half their standard deviation."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: tensor + (torch.randn(tensor.shape, generator=generator) * tensor.std(correction=0) / 2).to(tensor.dtype)
        for name, tensor in weights.items()
    }


def _prompts(model: Path) -> list[list[int]]:
    generator = np.random.default_rng(0)
    vocabulary = ModelDimensions.from_checkpoint(model).vocab_size
    lengths = generator.integers(8, LONGEST_PROMPT, _PROMPTS)
    return [generator.integers(0, vocabulary, length).tolist() for length in lengths]
