"""What an engine must hold to be trained with, each claim a function that tries it; Hugging Face's forward judges."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import Generation
from slime_like.verification.engine.driven import DrivenEngine
from slime_like.verification.engine.reference import Reference

TOLERANCE = 1e-4
"""Nats, in float32; at low temperatures more, since they scale the logits' rounding."""

_MOVES = 100 * TOLERANCE
"""A change of a tensor is large enough if the reference's logprobs change by so much."""
_FOLLOWS = 0.02
"""Share of that change by which engine and reference may differ after it: changed weights round differently."""
_DRAWS = 8

_TOKENS = 16
_COLD = 0.05
_HALFWAY_S = (0.1, 0.02, 0.005, 0.002, 0.05, 0.01, 0.2, 0.4, 0.8, 1.6)
_LASTING: dict[str, Any] = {"max_new_tokens": 200, "temperature": _COLD}


class Refuted(Exception):
    """An engine does not hold a claim; the message says what was found."""


@dataclass(slots=True)
class Subject:
    """An engine, the weights that it ought to serve, and what it is asked.

    Attributes:
        others: other weights of the same model.
    """

    engine: DrivenEngine
    reference: Reference
    others: dict[str, Tensor]
    prompts: Sequence[list[int]]

    def gap(self, prompt: list[int], generation: Generation, temperature: float) -> float:
        """Largest difference of the sampled tokens' logprobs from the reference's, relative to rounding at this
        temperature."""
        expected = self.reference.logprobs(prompt, generation.token_ids, temperature)
        largest = float(np.abs(generation.logprobs - expected).max(initial=0.0))
        return largest / max(1.0, 0.5 / (temperature or 1.0))

    def load(self, weights: dict[str, Tensor]) -> None:
        """Update the engine, whole, and expect these weights from now on."""
        receipt, sent = self.engine.run(self.engine.update(weights))
        if receipt.checksums != sent:
            raise Refuted("hashes of the received tensors are not those that were sent")
        self.reference.use(weights)

    def probe(self) -> np.ndarray:
        """Logprobs of all prompts' tokens, and of some that are sampled behind each, less the reference's."""
        options: dict[str, Any] = {"max_new_tokens": 4, "prompt_logprobs": True, "seed": 1}
        requests = [self.engine.request(prompt, **options) for prompt in self.prompts]
        gaps = []
        for prompt, (generation,) in zip(self.prompts, self.engine.generate_all(requests), strict=True):
            ids = np.concatenate((prompt[1:], generation.token_ids)).astype(np.int64)
            assert generation.prompt_logprobs is not None  # asked for
            found = np.concatenate((generation.prompt_logprobs, generation.logprobs))
            gaps.append(found - self.reference.logprobs(prompt[:1], ids, 1.0))
        return np.concatenate(gaps)


def _bounded(gap: float, what: str) -> float:
    if not gap <= TOLERANCE:
        raise Refuted(f"{what} differ by up to {gap:.1e} (bound {TOLERANCE:.0e})")
    return gap


def sampled_logprobs(subject: Subject) -> float:
    """Logprobs of sampled tokens are those of the temperature-scaled logits."""
    gaps = []
    for temperature in (1.0, 0.7, 0.0):
        options: dict[str, Any] = {"temperature": temperature, "max_new_tokens": _TOKENS}
        requests = [subject.engine.request(prompt, **options) for prompt in subject.prompts]
        for prompt, (generation,) in zip(subject.prompts, subject.engine.generate_all(requests), strict=True):
            gaps.append(subject.gap(prompt, generation, temperature))
    return _bounded(max(gaps), "logprobs")


def prompt_logprobs(subject: Subject) -> float:
    """Logprobs of a prompt's tokens are those of teacher forcing."""
    return _bounded(float(np.abs(subject.probe()).max()), "logprobs of prompts")


def greedy(subject: Subject) -> float:
    """Temperature 0 takes the likeliest token."""
    prompt = subject.prompts[0]
    (generation,) = subject.engine.generate(prompt, temperature=0.0, max_new_tokens=_TOKENS)
    logits = subject.reference.logits(prompt, generation.token_ids.tolist())[:-1]
    chosen = logits.gather(1, torch.from_numpy(generation.token_ids)[:, None])[:, 0]
    return _bounded(float((logits.max(dim=-1).values - chosen).max()), "logits of greedy tokens and the largest")


def seeds(subject: Subject) -> None:
    """A seed gives the same tokens alone and beside others; another seed, and none, give others."""

    def ids(seed: int | None, beside: bool) -> list[int]:
        # Rounding depends on the batch: of many tokens that are about as likely, it would choose another one.
        options: dict[str, Any] = {"seed": seed, "max_new_tokens": _TOKENS, "temperature": 0.3}
        requests = [subject.engine.request(subject.prompts[1], **options)]
        requests += [subject.engine.request(prompt, max_new_tokens=_TOKENS) for prompt in subject.prompts if beside]
        return subject.engine.generate_all(requests)[0][0].token_ids.tolist()

    alone = ids(7, beside=False)
    if ids(7, beside=True) != alone:
        raise Refuted("the same seed gave other tokens beside other requests")
    for seed in (8, None):
        if ids(seed, beside=False) == alone:
            raise Refuted(f"seed {seed} gave the tokens of seed 7")


def stop_tokens(subject: Subject) -> None:
    """A stop token ends a response, and stays in it."""
    prompt = subject.prompts[2]
    options: dict[str, Any] = {"max_new_tokens": _TOKENS, "temperature": 1.0}
    for seed in range(_DRAWS):
        (free,) = subject.engine.generate(prompt, seed=seed, **options)
        ids = free.token_ids.tolist()
        stop = ids[len(ids) // 2]
        (ended,) = subject.engine.generate(prompt, seed=seed, stop_token_ids=(stop,), **options)
        if ended.token_ids.tolist() != ids[: ids.index(stop) + 1] or ended.finish_reason != "stop":
            raise Refuted(
                f"sampled {ended.token_ids.tolist()} ({ended.finish_reason}) where {stop} should end a response"
            )


def truncated_sampling(subject: Subject) -> float | None:
    """Where it returns supports, they are the likeliest tokens, and logprobs are over them."""
    if not getattr(subject.engine.engine, "returns_supports", False):
        return None
    gaps, cut = [], {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "max_new_tokens": _TOKENS}
    requests = [subject.engine.request(prompt, **cut) for prompt in subject.prompts]
    for prompt, (generation,) in zip(subject.prompts, subject.engine.generate_all(requests), strict=True):
        if generation.supports is None:
            raise Refuted("it returned none")
        logits, expected = subject.reference.logits(prompt, generation.token_ids.tolist())[:-1] / 0.7, []
        for row, token, support in zip(logits, generation.token_ids.tolist(), generation.supports, strict=True):
            kept = torch.from_numpy(support).long()
            outside = row.index_fill(0, kept, float("-inf"))
            if token not in kept or float(outside.max() - row[kept].min()) > TOLERANCE:
                raise Refuted(f"token {token} was drawn from {kept.tolist()}, not from the likeliest tokens")
            expected.append(float(row[token] - row[kept].logsumexp(0)))
        gaps.append(float(np.abs(generation.logprobs - expected).max()))
    return _bounded(max(gaps), "logprobs over supports")


def abort_and_pause(subject: Subject) -> float:
    """An aborted request returns what it has sampled; a frozen one goes on."""
    engine = subject.engine

    async def aborted(prompt: list[int], delay_s: float) -> Generation:
        request = engine.request(prompt, **_LASTING)
        task = asyncio.create_task(engine.engine.generate(request))
        await asyncio.sleep(delay_s)
        await engine.engine.abort(request.request_id)
        return (await task)[0]

    async def frozen(prompt: list[int], delay_s: float) -> Generation:
        task = asyncio.create_task(engine.engine.generate(engine.request(prompt, **_LASTING)))
        await asyncio.sleep(delay_s)
        await engine.engine.pause("keep")
        await asyncio.sleep(delay_s)
        await engine.engine.resume()
        return (await task)[0]

    for prompt, delay_s in _attempts(subject):
        ended = engine.run(aborted(prompt, delay_s))
        if ended.finish_reason == "abort" and len(ended.token_ids):
            break
    else:
        raise Refuted(f"no request was aborted halfway, {min(_HALFWAY_S)} to {max(_HALFWAY_S)} s after its start")
    whole = engine.run(frozen(prompt, delay_s))
    if whole.finish_reason == "abort":
        raise Refuted("a request that was frozen has ended")
    gap = max(subject.gap(prompt, generation, _COLD) for generation in (ended, whole))
    return _bounded(gap, "logprobs after abort or pause")


def _attempts(subject: Subject) -> Iterator[tuple[list[int], float]]:
    """Prompts, and seconds after which a response to them may be caught halfway on a machine of any speed."""
    return ((prompt, delay_s) for delay_s in _HALFWAY_S for prompt in subject.prompts)


def idle_update(subject: Subject) -> float:
    """After an update all logprobs are of the new weights, cached prefixes included."""
    subject.probe()  # fills caches
    old = dict(subject.reference.weights)
    subject.load(subject.others)
    subject.others = old
    return _bounded(float(np.abs(subject.probe()).max()), "logprobs after an update")


def update_amid_requests(subject: Subject) -> float:
    """Tokens before an update are of the old weights, later ones of the new, and their versions say where."""
    engine = subject.engine

    async def scenario(prompt: list[int], delay_s: float) -> Generation:
        task = asyncio.create_task(engine.engine.generate(engine.request(prompt, **_LASTING)))
        await asyncio.sleep(delay_s)
        await engine.update(subject.others)
        return (await task)[0]

    for prompt, delay_s in _attempts(subject):
        version, before = engine.version, dict(subject.reference.weights)
        generation = engine.run(scenario(prompt, delay_s))
        old = subject.reference.logprobs(prompt, generation.token_ids, _COLD)
        subject.reference.use(subject.others)
        new, subject.others = subject.reference.logprobs(prompt, generation.token_ids, _COLD), before
        is_old = generation.weight_versions == version
        if 0 < is_old.sum() < len(is_old):
            if set(generation.weight_versions[~is_old].tolist()) != {engine.version}:
                raise Refuted(f"tokens after the update have versions {set(generation.weight_versions.tolist())}")
            gap = float(np.abs(generation.logprobs - np.where(is_old, old, new)).max())
            return _bounded(gap * 2 * _COLD, "logprobs around an update")
    raise Refuted("no update came in the middle of a response")


def every_tensor(subject: Subject) -> float:
    """Each tensor, changed alone, changes the engine's logprobs as it changes the reference's."""
    base, ignored, idle, largest = dict(subject.reference.weights), [], [], 0.0
    before = _expected(subject)
    for number, name in enumerate(base):
        changed, moved = _perturbed(subject, name, base[name], before, seed=number)
        if changed is None:
            idle.append(name)
            continue
        subject.load({**base, name: changed})
        gap = float(np.abs(subject.probe()).max())
        if gap > max(TOLERANCE, _FOLLOWS * moved):
            ignored.append(f"{name} ({gap:.1e} of {moved:.1e})")
        largest = max(largest, gap / moved)
    subject.load(base)
    if ignored:
        raise Refuted(f"updates of {len(ignored)} of {len(base)} tensors do not reach it: {', '.join(ignored)}")
    if idle:
        raise Refuted(f"nothing was shown for {len(idle)} tensors that changed no logprob: {', '.join(idle)}")
    return _bounded(float(np.abs(subject.probe()).max()), "logprobs after all changes were taken back")


def _perturbed(
    subject: Subject, name: str, tensor: Tensor, before: np.ndarray, seed: int
) -> tuple[Tensor | None, float]:
    """The tensor with noise that moves the reference's logprobs enough, and by how much it does."""
    generator = torch.Generator().manual_seed(seed)
    scale, moved = max(float(tensor.float().std(correction=0)), 0.1), 0.0
    for draw in range(_DRAWS):
        noise = torch.randn(tensor.shape, generator=generator) * scale * 2.0 ** (draw - 1)
        changed = (tensor.float() + noise).to(tensor.dtype)
        subject.reference.use({name: changed})
        moved = float(np.abs(_expected(subject) - before).max())
        subject.reference.use({name: tensor})
        if moved > _MOVES:
            return changed, moved
    return None, moved


def _expected(subject: Subject) -> np.ndarray:
    """The reference's logprobs of the prompts' tokens."""
    parts = [subject.reference.logprobs(prompt[:1], np.asarray(prompt[1:]), 1.0) for prompt in subject.prompts]
    return np.concatenate(parts)


def broken_updates(subject: Subject) -> float:
    """An update with a tensor missing, damaged, unknown or misshapen is rejected; the next one heals it."""
    weights = dict(subject.reference.weights)
    name, tensor = next(reversed(weights.items()))
    faults: dict[str, dict[str, Tensor]] = {
        f"without {name}": {n: t for n, t in weights.items() if n != name},
        "with an unknown tensor": {**weights, "model.no_such.weight": torch.zeros(4)},
        f"with {name} of another shape": {**weights, name: tensor[..., :-1].contiguous()},
        "with a damaged tensor": weights,
    }
    for what, sent in faults.items():
        if not _is_rejected(subject, sent, tampered=what == "with a damaged tensor"):
            raise Refuted(f"an update {what} was accepted")
    subject.load(weights)
    return _bounded(float(np.abs(subject.probe()).max()), "logprobs after rejected updates")


def _is_rejected(subject: Subject, weights: dict[str, Tensor], tampered: bool) -> bool:
    engine = subject.engine

    async def scenario() -> None:
        await engine.engine.begin_update(engine.version + 1)
        await engine.send(list(weights.items()), tamper=engine.flip_a_bit if tampered else None)
        await engine.engine.finish_update(engine.version + 1)

    try:
        engine.run(scenario())
    except WeightSyncError:
        return True
    return False


def sleep_and_wake(subject: Subject) -> float:
    """Asleep and awake again, with its weights kept and with new ones, it computes as before."""
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
        gaps.append(float(np.abs(subject.probe()).max()))
    return _bounded(max(gaps), "logprobs after sleeping")


Claim = Callable[[Subject], float | None]
CLAIMS: Sequence[Claim] = (
    sampled_logprobs,
    prompt_logprobs,
    greedy,
    seeds,
    stop_tokens,
    truncated_sampling,
    abort_and_pause,
    idle_update,
    update_amid_requests,
    every_tensor,
    broken_updates,
    sleep_and_wake,
)
"""In this order; some change the weights that the engine serves."""
