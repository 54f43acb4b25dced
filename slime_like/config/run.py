"""Root of the configuration, and conflicts between its sections."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from slime_like.config import sections
from slime_like.config.algorithm import AlgorithmConfig
from slime_like.config.base import Section, until_invalid
from slime_like.config.health import HealthConfig
from slime_like.config.lora import LoraConfig
from slime_like.config.roles import CRITIC, POLICY, REFERENCE, ModelRole, Roles
from slime_like.config.rollout import AGENT, ENVIRONMENT, RewardConfig, RolloutConfig, SyncConfig
from slime_like.config.trainer import FSDP, TrainerConfig
from slime_like.plugins.objective import BATCH_ADVANTAGES, DEMONSTRATION_LOSSES

MAX_STEPS = 999_999
"""Names of checkpoints and saved rollouts have six digits, so they sort by step."""

MAX_SEED = 2**32 - 1
"""Every random generator in use accepts it, and seeds derived from it."""

_TOKEN_S, _LEAST_REQUEST_S = 0.2, 600.0
_START_S, _GPU_START_S = 300.0, 1200.0


class RunConfig(Section):
    """Root of the configuration. YAML keys and command-line flags have these names."""

    run_dir: Path = Field(description="Directory that the run writes.")
    steps: int = Field(100, ge=1, le=MAX_STEPS, description="Training steps.")
    seed: int = Field(0, ge=0, le=MAX_SEED, description="Seed of data order, sampling and initialization.")
    resume: str = "auto"
    """auto: from the latest checkpoint, if any. never: start over and rename the earlier run. PATH: that checkpoint."""
    model: sections.ModelConfig
    reference: sections.ReferenceConfig = sections.ReferenceConfig()
    distillation: sections.DistillationConfig = sections.DistillationConfig()
    critic: sections.CriticConfig = sections.CriticConfig()
    data: sections.DataConfig = sections.DataConfig()
    evaluation: sections.EvaluationConfig = sections.EvaluationConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    sync: SyncConfig = SyncConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: sections.CheckpointConfig = sections.CheckpointConfig()
    logging: sections.LoggingConfig = sections.LoggingConfig()
    health: HealthConfig = HealthConfig()
    debug: sections.DebugConfig = sections.DebugConfig()
    profile: sections.ProfileConfig = sections.ProfileConfig()
    cluster: sections.ClusterConfig = sections.ClusterConfig()

    @model_validator(mode="before")
    @classmethod
    def _name_base(cls, data: Any) -> Any:
        """Replace the word ``base`` by the model's path."""
        if isinstance(data, dict) and isinstance(model := data.get("model"), dict):
            for name in (REFERENCE, CRITIC):
                if isinstance(role := data.get(name), dict) and role.get("path") == "base":
                    data = {**data, name: {**role, "path": model.get("path")}}
        return data

    @property
    def supervised(self) -> bool:
        """Whether the run trains on demonstrations, without engines and rewards."""
        return self.algorithm.supervised

    @property
    def samples_per_row(self) -> int:
        """Trajectories of each row of a step: its samples, or one demonstration."""
        return 1 if self.supervised else self.rollout.samples_per_prompt

    @property
    def starts_engines(self) -> bool:
        """Whether the run starts engines."""
        return not (self.supervised or self.debug.load_rollouts)

    @property
    def has_own_engines(self) -> bool:
        """Whether the run has engines on GPUs that no trainer rank uses."""
        return self.starts_engines and self.cluster.placement == "separate"

    @property
    def engines_map_memory(self) -> bool:
        """Whether engines may map the ranks' buffers. On shared devices, ``auto`` can select that transport."""
        shared = self.starts_engines and self.cluster.placement == "colocated"
        return shared and self.sync.transport in ("auto", "colocated")

    @property
    def roles(self) -> Roles:
        """Models of the run."""
        path, layout, fields = self.model.path, self.trainer.parallel, ("old_logprobs", "entropy")
        scores = (self.algorithm.scores_policy or self.distillation.sampled_coef > 0) and not self.supervised
        policy = ModelRole(name=POLICY, path=path, fields=fields, trained=True, scores=scores, parallel=layout)
        frozen = [self.reference.role(REFERENCE, "ref_logprobs")] if self.algorithm.needs_reference else []
        frozen += self.distillation.roles if self.distillation.is_set else []
        return Roles({role.name: role for role in (policy, *frozen, *self._critic)})

    @property
    def _critic(self) -> list[ModelRole]:
        """The role of the critic, if there is one."""
        if not self.algorithm.needs_critic:
            return []
        layout = self.critic.layout(self.trainer.parallel)
        options: dict[str, Any] = {"trained": True, "scores": True, "head": "value", "placement": "ranks"}
        options["workers"] = int(self.critic.placement == "separate")
        return [ModelRole(name=CRITIC, path=self.critic.path, fields=("values",), parallel=layout, **options)]

    def for_critic(self) -> Self:
        """Return the configuration of the critic's ranks, whose modules hold its weights and a value head."""
        config = self.for_worker(self.roles[CRITIC])
        lora = config.model.lora.model_copy(update={"rank": None})  # merged, not trained
        model = config.model.model_copy(update={"lora": lora})
        settings = {"optimizer": self.critic.optimizer, "router_bias_rate": 0.0}
        trainer = config.trainer.model_copy(update=settings)
        critic = config.critic.model_copy(update={"warmup_steps": 0})
        return config.model_copy(update={"model": model, "trainer": trainer, "critic": critic})

    def has_same_base(self, role: ModelRole) -> bool:
        """Return whether a role has the policy's first weights or base, so only trained weights are swapped for it."""
        model = self.model
        return role.path is None or (role.path == model.path and (model.weights is None or model.lora.is_set))

    def for_worker(self, role: ModelRole) -> Self:
        """Return the configuration of a role's own ranks, whose modules hold its weights."""
        path = {} if role.path is None else {"path": role.path, "weights": None, "lora": LoraConfig()}
        layout = {"parallel": role.parallel, "rendezvous_port": None}
        update = {"model": self.model.model_copy(update=path), "trainer": self.trainer.model_copy(update=layout)}
        return self.model_copy(update=update)

    def bucket_bytes(self, on_gpus: bool) -> int:
        """Return the largest bucket of a weight sync. Shared GPUs have room, because the KV cache is released."""
        roomy = on_gpus and self.cluster.placement == "colocated"
        return int((self.sync.bucket_mb or (1024 if roomy else 256)) * 2**20)

    @property
    def samples_after_saves(self) -> bool:
        """Whether sampling follows a checkpoint without a weight sync between them."""
        return 0 < self.checkpoint.every < self.steps

    @property
    def request_timeout_s(self) -> float:
        """Timeout of one request. A large model takes 0.05 s per token; a full engine makes requests wait."""
        longest = max(self.rollout.max_new_tokens, self.evaluation.max_new_tokens or 0)
        return self.rollout.request_timeout_s or max(_LEAST_REQUEST_S, _TOKEN_S * longest)

    @property
    def engine_start_timeout_s(self) -> float:
        """Timeout of an engine's start on a CPU. ``for_gpu_engines`` sets the default for GPUs."""
        return self.rollout.start_timeout_s or _START_S

    def for_gpu_engines(self) -> Self:
        """Return the configuration for engines on GPUs, which also compile and capture graphs when they start."""
        seconds = self.rollout.start_timeout_s or _GPU_START_S
        return self.model_copy(update={"rollout": self.rollout.model_copy(update={"start_timeout_s": seconds})})

    @property
    def silence_s(self) -> float:
        """Longest time without any answer of an engine. With agents, a request is a group of rollouts that may wait
        for workers."""
        agent = self.rollout.agent
        if not agent.is_set:
            return self.request_timeout_s
        samples = max(self.rollout.samples_per_prompt, self.evaluation.samples_per_prompt)
        rounds = 1 + math.ceil(samples / agent.workers)
        return max(self.request_timeout_s, rounds * (agent.timeout_s + agent.start_timeout_s))

    @property
    def longest_row(self) -> int:
        """Tokens of the longest sequence in training."""
        row = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        return self.max_model_len if self.rollout.agent.is_set else row

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and response together, of training and evaluation."""
        response, held_out = self.rollout.max_new_tokens, self.evaluation
        if held_out.files and not self.rollout.agent.is_set:  # an agent's rows may be as long as this
            response = max(response, held_out.max_new_tokens or 0)
        return self.rollout.max_model_len or self.data.max_prompt_tokens + response

    @property
    def total_updates(self) -> int:
        """Optimizer steps of the whole run."""
        return (self.steps - self.critic.warmup_steps) * self.algorithm.epochs * self.algorithm.minibatches

    @property
    def schedule(self) -> dict[str, Any]:
        """Settings that determine the learning rate and weight decay of every update. A resumed run keeps them."""
        settings = self.trainer.optimizer
        found = {name: getattr(settings, name) for name in ("lr", "min_lr", "warmup_steps", "decay", "weight_decay")}
        if settings.final_weight_decay is not None:
            found["final_weight_decay"] = settings.final_weight_decay
        return found | ({"updates": self.total_updates} if settings.depends_on_length else {})

    def conflicts(self) -> Iterator[str]:
        yield from until_invalid(self._trainer_conflicts)
        engines = self.rollout.num_engines if self.starts_engines else 0
        yield from self.profile.conflicts_of_run(self.steps, self.trainer.parallel.world_size, engines)
        if missing := [step for step in self.debug.capsule if step != "health" and not 1 <= step <= self.steps]:
            yield f"debug.capsule={missing} do not exist; use 1 to {self.steps}"
        if "health" in self.debug.capsule and not self.checkpoint.every:
            yield "debug.capsule=health keeps all batches since the last checkpoint; set checkpoint.every"
        if self.algorithm.needs_critic:
            yield from until_invalid(lambda: self.critic.conflicts_of_use(self.trainer, self.steps, self.model))
        elif changed := self.critic.changed:
            use = "demonstrations need none" if self.supervised else "only algorithm.advantage=gae has a critic"
            yield f"critic.{changed} is set, but {use}; remove it"
        if self.supervised:
            yield from self.algorithm.unread()
            if self.distillation.is_set:
                yield f"algorithm.loss={self.algorithm.loss} has no samples to distil; set distillation.coef to 0"
            return
        yield from self.distillation.conflicts_with_sources([source.name for source in self.data.mixture])
        yield from until_invalid(self._sampling_conflicts)
        yield from until_invalid(self._placement_conflicts)
        if self.rollout.stream:
            yield from self._streaming_conflicts()
        if self.rollout.agent.is_set:  # a rewritten history gives several rows, on different ranks
            yield from self.algorithm.row_conflicts()
            if (buffer := self.algorithm.overlong.buffer) is not None:
                yield f"algorithm.overlong.buffer={buffer} does not apply to rollout.agent; remove it"

    def _sampling_conflicts(self) -> Iterator[str]:
        rollout, algorithm = self.rollout, self.algorithm
        if self.data.messages_key is not None:
            remedy = f"set it to {' or '.join(DEMONSTRATION_LOSSES)}, or remove the key"
            yield f"data.messages_key={self.data.messages_key} needs an algorithm.loss of demonstrations; {remedy}"
        compares = algorithm.compares_samples and not self.distillation.is_set
        if rollout.samples_per_prompt == 1 and compares:
            problem = f"algorithm.advantage={algorithm.advantage} compares samples, so every advantage would be 0"
            yield f"rollout.samples_per_prompt=1: {problem}; use at least 2, or advantage: reinforce_pp"
        if rollout.drop_zero_spread and algorithm.advantage.name == "remax":
            yield "rollout.drop_zero_spread=true drops groups that remax compares with the greedy response; use false"
        buffer, most = algorithm.overlong.buffer, rollout.max_new_tokens
        if buffer is not None and buffer > most:
            yield f"algorithm.overlong.buffer={buffer} exceeds rollout.max_new_tokens={most}; use at most that"
        if rollout.max_staleness > 0 and self.cluster.placement == "colocated":
            yield f"rollout.max_staleness={rollout.max_staleness} needs cluster.placement=separate; use it, or set 0"
        accepted = "correction" in algorithm.importance.model_fields_set
        remedy = "set algorithm.importance.correction to truncate or mask, or to none to accept the bias"
        if rollout.max_staleness > 0 and not accepted:
            yield f"rollout.max_staleness={rollout.max_staleness} biases the gradient by older samples; {remedy}"
        quantization = self.sync.quantization
        for setting, value in (("sync.quantization", quantization), ("trainer.fp8", self.trainer.fp8)):
            if value != "none" and not accepted:
                yield f"{setting}={value} biases the gradient by rounding on one side; {remedy}"
        if quantization != "none" and self.model.lora.sends_factors:
            problem = "rounds matrices, but model.lora.sync=adapter sends factors"
            yield f"sync.quantization={quantization} {problem}; use model.lora.sync=merged, or quantization: none"
        whole = "top_p: 1, top_k: -1 and min_p: 0"
        unknown = self.trainer.backend not in ("megatron", FSDP)
        if rollout.bounded_top_k != -1 and unknown:
            problem = f"trainer.backend={self.trainer.backend} cannot train on truncated sampling"
            yield f"{problem}; use megatron or fsdp, or {whole} of rollout"
        if self.distillation.exact_coef > 0 and (unknown or rollout.bounded_top_k != -1):
            problem = f"needs trainer.backend=megatron or fsdp, and {whole} of rollout"
            yield f"distillation.mode=exact {problem}; use these, or distillation.mode: sampled"
        if not any(function.weight for function in self.reward.functions) and not self.distillation.is_set:
            yield "reward.functions: every weight is 0, so every reward is 0; give a function a weight"
        rewards = {function.name for function in self.reward.functions}
        if ENVIRONMENT in rewards and rollout.environment.name is None:
            yield "reward.functions: the reward `environment` needs an environment; set rollout.environment.name"
        if AGENT in rewards and not rollout.agent.is_set:
            yield "reward.functions: the reward `agent` needs an agent; set rollout.agent.name"

    def _placement_conflicts(self) -> Iterator[str]:
        sync, colocated = self.sync, self.cluster.placement == "colocated"
        if sync.transport == "nccl" and colocated:
            yield "sync.transport=nccl needs a device per process, so cluster.placement cannot be colocated; use auto"
        if sync.transport == "colocated" and not colocated:
            yield "sync.transport=colocated needs cluster.placement=colocated; use auto"
        if self.reference.placement == "workers" and not self.algorithm.needs_reference:
            yield "reference.placement=workers needs algorithm.kl.coef or kl_reward.coef above 0; set one, or remove it"
        for section in {role.section for role in self.roles.with_workers if self.debug.load_rollouts is not None}:
            yield f"{section}.placement=workers scores during sampling, which debug.load_rollouts skips; use trainer"

    def _trainer_conflicts(self) -> Iterator[str]:
        trainer, optimizer = self.trainer, self.trainer.optimizer
        other = self.model.lora.is_set and self.reference.placement == "workers" and self.reference.path is not None
        if other and self.reference.update_interval:
            problem = "copies factors (model.lora), which workers with reference.path lack"
            remedy = "use reference.placement: trainer, no path, or 0"
            yield f"reference.update_interval={self.reference.update_interval} {problem}; {remedy}"
        if self.model.lora.is_set and trainer.router_bias_rate > 0:
            problem = "changes the base of low-rank factors (model.lora); set it to 0"
            yield f"trainer.router_bias_rate={trainer.router_bias_rate:g} {problem}"
        for section, layout in {role.section: role.parallel for role in self.roles.with_workers}.items():
            yield from (f"{section}.{text}" for text in trainer.layout_conflicts(layout))
        if trainer.fp8 != "none" and self.model.lora.is_set:
            yield f"trainer.fp8={trainer.fp8} needs Transformer Engine's layers, which model.lora replaces; use none"
        if trainer.fp8 != "none" and self.model.dtype == "float32":
            yield f"trainer.fp8={trainer.fp8} does not support model.dtype=float32; use bfloat16"
        if optimizer.offload and trainer.backend == "megatron" and self.model.dtype == "float32":
            yield "trainer.optimizer.offload=true does not support model.dtype=float32 in Megatron; use bfloat16"
        updates = self.total_updates
        if optimizer.decay != "constant" and optimizer.warmup_steps >= updates:
            problem = f"leaves none of {updates} optimizer steps for decay={optimizer.decay}"
            remedy = f"use at most {updates - 1}, or trainer.optimizer.decay: constant"
            yield f"trainer.optimizer.warmup_steps={optimizer.warmup_steps} {problem}; {remedy}"

    def _streaming_conflicts(self) -> Iterator[str]:
        """Yield settings that need the whole batch before a gradient can be summed."""
        algorithm = self.algorithm
        updates, kl, experts = (
            algorithm.epochs * algorithm.minibatches,
            algorithm.kl_reward,
            algorithm.moe_aux_loss_coef,
        )
        of_batch = algorithm.advantage.name in BATCH_ADVANTAGES or algorithm.needs_critic
        for setting, is_set, remedy in (
            ("cluster.placement=colocated", self.cluster.placement == "colocated", "use placement: separate"),
            (f"algorithm.epochs * minibatches={updates}", updates > 1, "set both to 1"),
            (f"algorithm.advantage={algorithm.advantage}", of_batch, "use one that compares within groups"),
            (f"algorithm.kl_reward.coef={kl.coef:g}", kl.coef > 0, "use algorithm.kl"),
            (f"distillation.mode={self.distillation.mode}", self.distillation.sampled_coef > 0, "use exact"),
            ("distillation.teachers", self.distillation.teachers, "use one teacher"),
            (f"algorithm.loss={algorithm.loss}", algorithm.chooses_tokens, "use ppo_clip"),
            ("algorithm.whiten=true", algorithm.whiten, "set it to false"),
            ("algorithm.importance.normalize=true", algorithm.importance.normalize, "set it to false"),
            ("algorithm.rejection.in_denominator=false", algorithm.rejection.shrinks, "set it to true"),
            (f"algorithm.moe_aux_loss_coef={experts:g}", experts > 0, "set it to 0"),
            ("debug.shuffle_advantages=true", self.debug.shuffle_advantages, "set it to false"),
        ):
            if is_set:
                problem = f"trains before the batch is complete, which {setting} does not allow"
                yield f"rollout.stream=true {problem}; {remedy}, or use rollout.stream: false"
