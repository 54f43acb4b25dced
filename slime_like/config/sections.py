"""Sections of models, data, evaluation, checkpoints, logging, debugging and the cluster."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_serializer, field_validator

from slime_like.config.base import Section
from slime_like.config.lora import LoraConfig
from slime_like.config.roles import TEACHER, ModelRole
from slime_like.config.rollout import MIN_TEMPERATURE
from slime_like.config.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from slime_like.errors import field_of


class ModelConfig(Section):
    """The initial policy. Its dimensions are read from the checkpoint's ``config.json``."""

    path: Path = Field(description="Hugging Face checkpoint of the initial policy: directory or hub id.")
    weights: Path | None = None
    """Checkpoint with the policy's weights, from `slime-like convert to-megatron` or a run's checkpoints/step-N."""
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Precision in trainer and engine.")
    trust_remote_code: bool = Field(False, description="Run Python code from the checkpoint.")
    lora: LoraConfig = LoraConfig()


class FrozenModelConfig(Section):
    """A model that scores the sampled tokens and is not trained."""

    path: Path | None = Field(None, description="Checkpoint. none: the initial policy. base: model.path, without lora.")
    placement: Literal["trainer", "workers"] = "trainer"
    """trainer: the trainer ranks swap in its weights. workers: separate devices score groups during sampling."""
    workers: int = Field(1, ge=1, description="Number of workers.")
    parallel: ParallelConfig = ParallelConfig()
    max_worker_restarts: int = Field(2, ge=0, description="Restarts of failed workers within an hour.")

    def role(self, name: str, *fields: str, head: str = "logprob") -> ModelRole:
        """Return the role of a frozen model with these settings."""
        separate = self.placement == "workers"
        return ModelRole(
            name=name,
            path=self.path,
            fields=fields,
            head=head,
            scores=not separate,
            placement=self.placement,
            parallel=self.parallel,
            workers=self.workers if separate else 0,
            max_restarts=self.max_worker_restarts,
        )


class ReferenceConfig(FrozenModelConfig):
    """The reference policy of the KL term. Used only when a KL coefficient is above 0."""

    update_interval: int = Field(0, ge=0, description="Steps after which the policy becomes the reference; 0: never.")


class DistillationConfig(FrozenModelConfig):
    """On-policy distillation from a teacher (arXiv:2306.13649, with the reverse KL)."""

    path: Path | None = Field(None, description="Hugging Face checkpoint of the teacher.")
    teachers: dict[str, Path] = Field(default_factory=dict)
    """Instead, one for each source of data.mixture; flags add to the file's, and `none` removes these."""
    mode: Literal["sampled", "exact"] = "sampled"
    """sampled: add log(pi_teacher / pi_old) to advantages. exact: add the KL over the vocabulary to the loss."""
    coef: float = Field(0.0, ge=0, description="Coefficient of the KL to the teacher; 0: off.")

    @property
    def is_set(self) -> bool:
        return self.coef > 0

    @property
    def exact_coef(self) -> float:
        """Coefficient of the exact KL in the loss."""
        return self.coef if self.mode == "exact" else 0.0

    @property
    def sampled_coef(self) -> float:
        """Coefficient of its estimate in advantages."""
        return self.coef - self.exact_coef

    @property
    def paths(self) -> dict[str | None, Path]:
        """Checkpoint of each source's teacher; by ``None``, the teacher of all sources."""
        one: dict[str | None, Path] = {} if self.path is None else {None: self.path}
        return dict[str | None, Path](self.teachers.items()) or one

    @property
    def roles(self) -> list[ModelRole]:
        """The roles of the teachers. Their hidden states travel, which are fewer numbers than their logits."""
        exact = self.exact_coef > 0
        head, field = ("hidden", "teacher_hidden") if exact else ("logprob", "teacher_logprobs")
        each = self.role(TEACHER, field, head=head)
        return [
            replace(each, path=path, source=source, name=TEACHER if source is None else f"{TEACHER}.teachers.{source}")
            for source, path in self.paths.items()
        ]

    def conflicts_with_sources(self, sources: Collection[str]) -> Iterator[str]:
        if self.teachers and self.teachers.keys() != set(sources):
            there, given = (", ".join(names) or "none" for names in (sources, self.teachers))
            yield f"distillation.teachers names {given}, but data.mixture {there}; give each source one teacher"

    def conflicts(self) -> Iterator[str]:
        if self.is_set and not self.paths:
            yield f"coef={self.coef:g} needs a teacher; set distillation.path or distillation.teachers"
        if self.teachers and self.path is not None:
            yield "teachers and distillation.path are both set; remove one"
        if not self.is_set and (changed := self.changed):
            yield f"{changed} is set, but distillation.coef=0; set a coefficient, or remove it"


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW of the critic."""

    lr: float = Field(1e-5, gt=0, le=1, description="Peak learning rate.")


class CriticConfig(Section):
    """The value model of `algorithm.advantage: gae` (PPO)."""

    path: Path | None = None
    """Hugging Face checkpoint of its first weights. none: the initial policy, with a head that starts at 0. base:
    model.path, without `model.lora`."""
    placement: Literal["shared", "separate"] = "shared"
    """shared: on the policy's devices, in turns. separate: on its own devices."""
    parallel: ParallelConfig | None = Field(None, description="Axes that differ from trainer.parallel.")
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    lam: float | None = Field(None, ge=0, le=1)
    """Trace decay of its returns; none: the estimator's `lam` (VAPO, arXiv:2504.05118, uses 1)."""
    value_clip: float | None = Field(0.2, gt=0, description="Largest change of a value that lowers the loss.")
    warmup_steps: int = Field(0, ge=0, description="First training steps that leave the policy as it is.")

    @field_serializer("parallel")
    def _given_axes(self, parallel: ParallelConfig | None) -> dict[str, Any] | None:
        return None if parallel is None else parallel.model_dump(exclude_unset=True)

    def layout(self, policy: ParallelConfig) -> ParallelConfig:
        """Return the layout of its ranks: the policy's, except for the given axes."""
        return policy if self.parallel is None else policy.model_copy(update=self._given_axes(self.parallel))

    def conflicts_of_use(self, trainer: TrainerConfig, steps: int, model: ModelConfig) -> Iterator[str]:
        """Yield what excludes a critic with these settings in a run of ``steps`` steps."""
        if self.path is None and model.weights is not None:
            yield f"model.weights={model.weights} has no value head; set critic.path to base, or a checkpoint"
        if self.parallel is not None:
            layout = self.layout(trainer.parallel)
            for text in trainer.layout_conflicts(layout):  # the trainer reports inherited axes
                if field_of(text).rpartition(".")[2] in self.parallel.model_fields_set:
                    yield f"critic.{text}"
            ranks, policy = layout.world_size, trainer.parallel.world_size
            if self.placement == "shared" and ranks > policy:
                problem = f"critic.parallel has {ranks} ranks, but trainer.parallel {policy}"
                yield f"critic.placement=shared: {problem}; use at most as many, or placement: separate"
        if self.warmup_steps >= steps:
            yield f"critic.warmup_steps={self.warmup_steps} leaves no step to train the policy; use fewer than steps"
        if self.optimizer.offload and trainer.backend == "megatron" and model.dtype == "float32":
            yield "critic.optimizer.offload=true does not support model.dtype=float32 in Megatron; use bfloat16"


TEMPLATE_INPUTS = {"conversation", "messages", "tools", "chat_template", "tokenize", "add_generation_prompt"}

DataFormat = Literal["keys", "gsm8k", "math", "dapo", "openr1"]


class DataSource(Section):
    """One source of a mixture."""

    name: str = Field(pattern=r"^[\w.-]+$", description="Name in metrics.")
    files: tuple[Path, ...] = Field(min_length=1, description="Files, like `data.train`.")
    weight: float = Field(1.0, gt=0, description="Share of the prompts, relative to the other sources.")
    format: DataFormat | None = Field(None, description="As `data.format`, which is the default.")


class DataConfig(Section):
    """Prompt files (JSONL or Parquet) and the keys in their rows. A dotted key leads into nested objects."""

    train: tuple[Path, ...] = ()
    """Training data: .jsonl, .parquet or .arrow files, patterns, or directories that Hugging Face's `datasets`
    saved. owner/name[@revision][/files] is a hub id."""
    mixture: tuple[DataSource, ...] = ()
    """Several sources instead of `train`, each with a relative share of the prompts."""
    format: DataFormat = Field("keys", description="Keys below, or a data set's published form.")
    system_prompt: str | None = Field(None, description="A system message before every prompt.")
    prompt_key: str = Field("prompt", description="Row key of the prompt, text or chat messages.")
    answer_key: str = Field("answer", description="Row key of the ground-truth answer.")
    response_key: str = Field("response", description="Row key of a demonstration, without its end (supervised only).")
    messages_key: str | None = None
    """Row key of a conversation whose assistant turns carry loss (supervised only)."""
    token_ids_key: str = Field("input_token_ids", description="Row key of a tokenized prompt, which replaces the text.")
    environment_key: str | None = Field(None, description="Row key of a mapping for the environment or agent.")
    apply_chat_template: bool = Field(True, description="Apply the tokenizer's chat template to prompts.")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="Variables of the chat template.")
    allow_special_tokens: bool = Field(False, description="Accept text that spells special tokens.")
    max_prompt_tokens: int = Field(1024, ge=1, description="Longer prompts are dropped and counted, never truncated.")
    shuffle: bool = Field(True, description="Shuffle every epoch.")
    cache_dir: Path | None = None
    """Directory for the encoded rows of large files, which later starts read; none: `run_dir/encoded_rows`."""

    def conflicts(self) -> Iterator[str]:
        names = [source.name for source in self.mixture]
        if names and self.train:
            yield "train and data.mixture are both set; make the files of data.train a source, or remove one"
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"mixture: several sources are named {name}; give each a different name"
        field, default = f"messages_key={self.messages_key}", type(self).model_fields["response_key"].default
        if self.messages_key is not None and self.response_key != default:
            yield f"{field} and data.response_key={self.response_key}: demonstrations have only one; remove the other"
        if self.messages_key is not None and not self.apply_chat_template:
            yield f"{field} needs the chat template; set data.apply_chat_template: true"
        if taken := sorted(TEMPLATE_INPUTS & self.chat_template_kwargs.keys()):
            yield f"chat_template_kwargs: {taken[0]} is set for each row; remove it"
        if self.system_prompt is not None and not self.apply_chat_template:
            yield "system_prompt needs the chat template; set data.apply_chat_template: true, or remove it"
        for name, is_set in (("system_prompt", self.system_prompt is not None), ("format", self.format != "keys")):
            if self.messages_key is not None and is_set:
                yield f"{name} applies to prompts, but data.messages_key reads conversations; remove one of them"

    @property
    def parts(self) -> tuple["DataConfig", ...]:
        """The settings of each source of the mixture, with its files as ``train``; without a mixture, only these."""
        return tuple(
            self.model_copy(update={"train": one.files, "mixture": (), "format": one.format or self.format})
            for one in self.mixture
        ) or (self,)

    @property
    def training_files(self) -> tuple[Path, ...]:
        """Training files of all sources."""
        return tuple(file for part in self.parts for file in part.train)


class EvaluationConfig(Section):
    """Held-out evaluation during training."""

    files: tuple[Path, ...] = Field((), description="Held-out files.")
    every: int = Field(0, ge=0, description="Interval in steps; 0: before and after training only.")
    max_prompts: int | None = Field(None, ge=1, description="Prompts used per file; none: all.")
    temperature: float = Field(0.0, ge=0.0, description="0 is greedy.")
    samples_per_prompt: int = Field(1, ge=1, description="Responses per prompt; above 1 also gives pass@k.")
    max_new_tokens: int | None = Field(None, ge=1, description="Length limit; none: `rollout.max_new_tokens`.")

    def conflicts(self) -> Iterator[str]:
        if self.every > 0 and not self.files:
            yield f"files=[] is empty, so every={self.every} has nothing to evaluate; give held-out files, or every: 0"
        if 0 < self.temperature < MIN_TEMPERATURE:
            yield f"temperature={self.temperature} is too low for engines; use 0 (greedy) or at least {MIN_TEMPERATURE}"
        if self.temperature == 0 and self.samples_per_prompt > 1:
            remedy = "use 1, or a temperature above 0"
            yield f"samples_per_prompt={self.samples_per_prompt} repeats evaluation.temperature=0's response; {remedy}"


class CheckpointConfig(Section):
    """Checkpoints and the exported model."""

    every: int = Field(0, ge=0, description="Checkpoint interval in steps; 0: at the end only.")
    keep: int = Field(2, ge=1, description="Number of newest checkpoints kept.")
    keep_every: int = Field(0, ge=0, description="Keep all checkpoints of steps divisible by this, too; 0: none.")
    async_save: bool = Field(False, description="Write checkpoints during training.")
    max_failed_saves: int = Field(2, ge=0, description="Successive saves that a full disk may refuse.")
    override: tuple[Literal["schedule", "data"], ...] = ()
    """Changes that a resumed run accepts. Changed data begin with a new epoch."""
    export_hf: bool = Field(True, description="Write a Hugging Face model at the end.")


class LoggingConfig(Section):
    """Destinations of metrics; `metrics.jsonl` is always written."""

    tensorboard: bool = Field(True, description="Write a TensorBoard log.")
    wandb: bool = Field(False, description="Log to Weights & Biases.")
    wandb_project: str = Field("slime-like", description="W&B project.")
    wandb_entity: str | None = Field(None, description="W&B user or team.")
    wandb_group: str | None = Field(None, description="W&B group.")
    wandb_tags: tuple[str, ...] = Field((), description="W&B tags.")
    prometheus_port: int | None = Field(
        None, ge=1, le=65535, description="Port on 127.0.0.1 for [Prometheus](metrics.md#prometheus)."
    )
    progress: Literal["auto", "live", "plain", "off"] = "auto"
    """Progress display; auto: live on a terminal, else plain lines."""
    timeline: bool = Field(True, description="Record what every process did when, for `slime-like report --trace`.")


class DebugConfig(Section):
    """Control runs, debug tables and saved rollouts."""

    shuffle_advantages: bool = Field(False, description="Permute advantages: a control run, which must not learn.")
    samples_per_step: int = Field(4, ge=0, description="Samples per logged step in the debug tables; 0: none.")
    tables_every: int = Field(10, ge=1, description="Interval of debug tables in steps.")
    save_rollouts: Path | None = Field(None, description="Directory for every step's scored rollouts.")
    load_rollouts: Path | None = Field(None, description="Directory of saved rollouts to train on, without engines.")
    capsule: tuple[int | Literal["health"], ...] = ()
    """Steps to [keep for a replay](troubleshooting.md#replay-a-step) in `run_dir/capsules`. health: also those that
    raise an alarm."""
    keep_capsules: int = Field(8, ge=1, description="Number of newest capsules kept.")

    def conflicts(self) -> Iterator[str]:
        if self.load_rollouts is not None and self.shuffle_advantages:
            yield "shuffle_advantages=true does not apply to debug.load_rollouts; sample again, or set it to false"
        if self.capsule and self.shuffle_advantages:
            yield "shuffle_advantages=true cannot be replayed; set it to false, or remove debug.capsule"


class ProfileConfig(Section):
    """Traces of some steps by torch's profiler, in run_dir/profiles, for Perfetto."""

    steps: tuple[int, ...] = Field((), description="Steps to trace.")
    ranks: tuple[int, ...] = Field((0,), description="Trainer ranks.")
    engines: tuple[int, ...] = Field((0,), description="Engines.")
    memory: bool = Field(False, description="Also allocations; on a GPU a snapshot for pytorch.org/memory_viz.")

    def conflicts_of_run(self, steps: int, ranks: int, engines: int) -> Iterator[str]:
        """Yield conflicts with the numbers of steps, of trainer ranks, and of engines; 0: the run has no engines."""
        for name, numbers, least, most in (
            ("steps", self.steps, 1, steps),
            ("ranks", self.ranks, 0, ranks - 1),
            ("engines", self.engines if engines else (), 0, engines - 1),
        ):
            if self.steps and (wrong := [number for number in numbers if not least <= number <= most]):
                yield f"profile.{name}={wrong} do not exist; use {least} to {most}"


GpuName = Literal["a100-80gb", "h100-80gb", "h200-141gb", "b200"]


class FallbackLayout(Section):
    """A smaller layout, in which `slime-like launch` starts if nodes stay away."""

    nodes: int = Field(ge=1, description="Nodes that it needs.")
    parallel: dict[str, int] = Field(default_factory=dict, description="Sizes in `trainer.parallel` that change.")
    num_engines: int | None = Field(None, ge=1, description="`rollout.num_engines`; none: as without the fallback.")

    @property
    def flags(self) -> tuple[str, ...]:
        """The layout's changes, as flags."""
        engines = {} if self.num_engines is None else {"rollout.num_engines": self.num_engines}
        sizes = {f"trainer.parallel.{axis}": size for axis, size in self.parallel.items()} | engines
        return tuple(part for name, size in sizes.items() for part in (f"--{name}", str(size)))


class ClusterConfig(Section):
    """The Ray cluster."""

    address: str | None = Field(None, description="Address of a running Ray cluster.")
    object_store_mb: int = Field(512, ge=80, description="Ray's object store, in MiB per node.")
    placement: Literal["separate", "colocated"] = "separate"
    """colocated: engines and trainer ranks take turns on the same devices."""
    nodes: int | None = Field(None, ge=1, description="Nodes; `slime-like launch` sets it. none: as many as needed.")
    gpus_per_node: int = Field(8, ge=1, description="GPUs per node; `slime-like launch` counts them.")
    allow_idle_gpus: bool = Field(False, description="Accept GPUs of `nodes` that nothing uses.")
    hang_timeout_s: float = Field(300.0, ge=90)
    """Time without progress after which a worker is ended; at least ten times its usual longest wait for progress."""
    fallback_layouts: tuple[FallbackLayout, ...] = ()
    """Smaller layouts for `slime-like launch`, largest first, if nodes do not come within `--nodes_timeout_s`."""
    gpu: GpuName = Field("h100-80gb", description="GPU assumed by `slime-like plan`.")
    gpu_memory_gib: float | None = Field(None, gt=0, description="GPU memory in GiB, for the plan.")
    host_memory_gib: float | None = Field(None, gt=0, description="Node memory in GiB, for the plan.")
    nvlink_gb_per_s: float | None = Field(None, gt=0, description="GB/s between GPUs of a node, for the plan.")
    network_gb_per_s: float = Field(50.0, gt=0, description="GB/s between nodes per GPU, for the plan.")

    def nodes_for(self, devices: int) -> int:
        """Count the nodes of an engine with this many devices."""
        return -(-devices // self.gpus_per_node)

    @field_validator("address")
    @classmethod
    def _reject_client(cls, address: str | None) -> str | None:
        """Reject Ray clients. They have no session directory, and the run needs its node's."""
        if address is not None and address.startswith("ray://"):
            remedy = "start the run on a node of the cluster, with auto or the HOST:PORT of `ray start --head`"
            raise ValueError(f"is the address of a Ray client, which is not supported; {remedy}")
        return address
