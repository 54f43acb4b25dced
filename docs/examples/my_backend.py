"""A trainer backend in one file: a dense Hugging Face model on one rank."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from slime_like.algorithms import LossInputs, LossSums, build_loss, logprobs_and_entropy
from slime_like.config import RunConfig
from slime_like.errors import TrainerError
from slime_like.interfaces import Manifest, RankCoordinates, RankPlacement, Scores, WeightBucket, WeightExport
from slime_like.statistics import GRPOStats
from slime_like.trajectory import PackedTrajectory


class PlainTrainer:
    """One rank, one sequence at a time."""

    def __init__(self, config: RunConfig, placement: RankPlacement) -> None:
        self.config, self.rank, self.role = config, placement.rank, placement.role
        self.frozen: dict[str, Any] = {}  # models of other roles
        self._loss = build_loss(config.algorithm)

    @staticmethod
    def check(config: RunConfig) -> list[str]:
        problems = []
        if config.trainer.parallel.world_size != 1:
            problems.append("trainer.parallel has several ranks, the plain backend one; set every axis to 1")
        if config.checkpoint.async_save:
            problems.append("checkpoint.async_save=true is not supported by the plain backend; set false")
        return problems

    def setup(self) -> RankCoordinates:
        coordinates = self.setup_for_scoring()
        self.frozen = {role.name: self._load(role.path or self.config.model.path) for role in self.config.roles.held}
        settings, further = self.config.trainer.optimizer, self.config.trainer.backend_args
        betas = (settings.beta1, settings.beta2)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), settings.lr, betas, settings.eps, settings.weight_decay, **further
        )
        return coordinates

    def setup_for_scoring(self, checkpoint: Path | None = None) -> RankCoordinates:
        if problems := self.check(self.config):
            raise TrainerError(f"trainer rank {self.rank}, setup: {'; '.join(problems)}")
        if checkpoint is None:
            self.model = self._load(self.config.model.path)
        else:  # model.path may have no weights
            shape = AutoConfig.from_pretrained(self.config.model.path)
            self.model = AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, self.config.model.dtype))
            self.load_weights(checkpoint, self.role)
        return RankCoordinates(tensor=0, pipeline=0, context=0, data=0, expert=0, data_size=1)

    def _load(self, path: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, self.config.model.dtype))

    def begin_step(self, denominator: float | None = None, tokens: int | None = None) -> None:
        self.optimizer.zero_grad()
        self._sums = LossSums.zeros()

    def accumulate(self, micro_batches: Sequence[PackedTrajectory], last: bool = False) -> None:
        for pack in micro_batches:
            logprobs, entropy = _score(self.model, pack)
            output = self._loss(
                LossInputs(
                    logprobs=logprobs,
                    entropy=entropy,
                    old_logprobs=pack.old_logprobs,
                    behaviour_logprobs=pack.logprobs,
                    ref_logprobs=pack.ref_logprobs,
                    advantages=pack.advantages,
                    loss_mask=pack.loss_mask,
                    token_weights=pack.token_weights,
                    response_lens=pack.response_lens,
                )
            )
            output.loss.backward()
            self._sums = self._sums.add(output.sums)

    def finish_step(self, denominator: float) -> GRPOStats:
        settings = self.config.trainer.optimizer
        for parameter in self.model.parameters():
            parameter.grad /= denominator
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_grad)
        if not torch.isfinite(norm):
            raise TrainerError(f"trainer rank {self.rank}: the gradient norm is {norm}; nothing was updated")
        self.optimizer.step()
        return self._sums.to_stats(denominator, norm, settings.lr)

    @torch.no_grad()
    def score(self, micro_batches: Sequence[PackedTrajectory], role: str | None = None) -> list[Scores]:
        name = role or self.role
        model, fields = self.frozen.get(name, self.model), self.config.roles[name].fields
        return [dict(zip(fields, _score(model, pack), strict=False)) for pack in micro_batches]

    def export_weights(self) -> WeightExport:
        weights = {name: tensor.detach() for name, tensor in self.model.named_parameters()}
        return WeightExport(Manifest.of(weights), (WeightBucket([weight]) for weight in weights.items()))

    def export_gradients(self, denominator: float) -> Iterator[WeightBucket]:
        for name, tensor in self.model.named_parameters():
            yield WeightBucket([(name, tensor.grad.float() / denominator)])

    def export_hf(self, directory: Path) -> None:
        self.model.save_pretrained(directory)
        AutoTokenizer.from_pretrained(self.config.model.path).save_pretrained(directory)

    def save(self, directory: Path) -> None:
        self.save_weights(directory)
        torch.save(self.optimizer.state_dict(), directory / "optimizer.pt")

    def load(self, directory: Path) -> None:
        self.load_weights(directory, self.role)
        self.optimizer.load_state_dict(torch.load(directory / "optimizer.pt", weights_only=True))

    def save_weights(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        torch.save(self.model.state_dict(), directory / "model.pt")

    def load_weights(self, directory: Path, role: str) -> None:
        model = self.frozen.get(role, self.model)
        model.load_state_dict(torch.load(directory / "model.pt", weights_only=True))

    def offload(self, keep_weights: bool = False) -> None:
        """A CPU's memory is host memory."""

    def onload(self) -> None:
        """See ``offload``."""

    def shutdown(self) -> None:
        """There is no process group."""


def _score(model: Any, pack: PackedTrajectory) -> tuple[torch.Tensor, torch.Tensor]:
    """(R,) logprobs and entropies in the pack's order, at each sequence's temperature."""
    rows = []
    for (start, end), prompt, temperature in zip(
        pack.sequence_map.tolist(), pack.prompt_lens, pack.temperatures, strict=True
    ):
        tokens = pack.tokens[start:end]
        logits = model(tokens[None]).logits[0, int(prompt) - 1 : -1].float() / temperature
        rows.append(logprobs_and_entropy(logits, tokens[prompt:]))
    return torch.cat([logprobs for logprobs, _ in rows]), torch.cat([entropy for _, entropy in rows])
