"""Trainer and engines with the same weights, which compute the logprobs of given rows again."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from torch import Tensor

from slime_like.checks.transport import chosen_transport
from slime_like.errors import EngineError, WeightSyncError
from slime_like.interfaces import Generation, GenerationRequest, PromptInput, SamplingParams, TrainerBackend
from slime_like.orchestration.cluster.placement import Placement
from slime_like.orchestration.rollout.colocation import Turns
from slime_like.orchestration.rollout.engine_client import EngineClient
from slime_like.orchestration.rollout.supervisor import EngineSupervisor
from slime_like.orchestration.rollout.sync_probe import Probe
from slime_like.orchestration.run.engines import launch_engines
from slime_like.orchestration.trainer.group import TrainerGroup
from slime_like.orchestration.trainer.scoring import score_sequences
from slime_like.orchestration.weight_sync import WeightSync
from slime_like.trajectory import ScoredTrajectory
from slime_like.verification.gap.batch import SavedBatch


class Sides:
    """Trainer ranks of a run and, once they are asked, its engines, which load the trainer's weights."""

    def __init__(self, run_name: str, batch: SavedBatch, placement: Placement, stack: ExitStack) -> None:
        self._run_name, self._config, self._checkpoint = run_name, batch.config, batch.checkpoint
        self._placement, self._stack = placement, stack
        self._trainers = TrainerGroup(batch.config, placement)
        self._engines: EngineSupervisor | None = None
        self._turns = Turns()

    @classmethod
    @contextmanager
    def opened(cls, run_name: str, batch: SavedBatch, with_engines: bool) -> Iterator[Self]:
        """Start the ranks in the cluster ``run_name``, with the weights of ``batch``. All ends with the context.

        Args:
            with_engines: whether to reserve devices for engines.
        """
        with Placement(batch.config, with_engines=with_engines) as placement, ExitStack() as stack:
            sides = cls(run_name, batch, placement, stack)
            stack.callback(sides._trainers.shutdown)
            sides._trainers.launch()
            sides._trainers.setup(only_scores=True, checkpoint=batch.checkpoint)
            yield sides

    def score(self, rows: Sequence[ScoredTrajectory]) -> list[Tensor]:
        """Return the trainer's logprobs, (response_len,) of each row, at its temperature and over its supports."""
        self._turns.training(keep_weights=True)
        return [each["old_logprobs"] for each in score_sequences(self._trainers.ranks, rows, self._config.trainer)]

    def teach(self, rows: Sequence[ScoredTrajectory]) -> tuple[list[Tensor], list[Tensor] | None]:
        """Return an engine's logprobs of each row, (response_len,), and its ``routes``, or ``None`` if it has none.

        The engine gets the rows as prompts, and scores at temperature 1 over the vocabulary.
        """
        sampling = SamplingParams(max_new_tokens=1)
        prompts = [PromptInput(torch.cat((row.prompt_tokens, row.response_tokens)).tolist()) for row in rows]
        requests = [
            GenerationRequest(row.sequence_id, prompt, sampling, prompt_logprobs=True)
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        answers = [generation for (generation,) in self._generated(requests)]
        logprobs = [
            torch.tensor(each.prompt_logprobs)[row.prompt_len - 1 :] for row, each in zip(rows, answers, strict=True)
        ]
        if "routes" not in answers[0].fields:
            return logprobs, None
        routes = [torch.tensor(each.fields["routes"]) for each in answers]
        return logprobs, [each[: row.total_len - 1] for row, each in zip(rows, routes, strict=True)]

    def sync_problem(self) -> str | None:
        """Send the weights to the engines as the run does. Return why a verified sync fails, or ``None``."""
        config, engines = self._config, self._started()
        probe = Probe(config.model, config.sync.probe_tolerance, config.max_model_len, ())
        probe.trial_due = False
        transport = chosen_transport(config, self._placement.device == "GPU", self._placement.num_nodes)
        settings, ranks = config.sync.model_copy(update={"verify": True}), self._trainers.ranks
        parts = settings, transport, config.model.dtype, probe, ranks, engines, self._turns, self._run_name
        try:
            (sync := WeightSync(*parts)).connect()
            sync.run(1)
        except (EngineError, WeightSyncError) as error:
            return error.problem
        return None

    def _generated(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        client = EngineClient(self._started())
        self._turns.generation()
        return client.generate(requests)

    def _started(self) -> EngineSupervisor:
        if self._engines is not None:
            return self._engines
        colocated = self._config.cluster.placement == "colocated"
        config = self._config.model_copy(update={"model": self._config.model.model_copy(update=self._exported())})
        devices, watch = self._trainers.devices() if colocated else (), self._trainers.liveness().check
        self._engines, _ = launch_engines(config, self._stack, self._placement, print, devices, watch)
        if colocated:
            self._trainers.offload()
        self._engines.start()
        if colocated:
            self._engines.sleep(keep_weights=True)
            self._trainers.onload()
            self._turns = Turns((self._trainers, self._engines))
        return self._engines

    def _exported(self) -> dict[str, Any]:
        """Write the trainer's weights as a Hugging Face directory. Return the settings of ``model`` that name it."""
        model = self._config.model
        if self._checkpoint is None and model.weights is None and not model.lora.is_set:
            return {}
        parent = self._stack.enter_context(TemporaryDirectory(prefix="explain-gap-", dir=self._config.run_dir))
        self._trainers.ranks.call("exporting weights", TrainerBackend.export_hf, directory := Path(parent, "hf"))
        return {"lora": model.lora.model_copy(update={"path": directory})} if model.lora.is_set else {"path": directory}
