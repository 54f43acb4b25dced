"""The whole configuration of one run."""

import math
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator

from slime_like.config.algorithm import AlgorithmConfig
from slime_like.config.base import Section
from slime_like.config.gpus import GpuName
from slime_like.config.rollout import RewardConfig, RolloutConfig, SyncConfig
from slime_like.config.trainer import ParallelConfig, TrainerConfig

MAX_STEPS = 999_999
"""Checkpoints and kept rollouts are named by step, in six digits that sort."""

MAX_SEED = 2**32 - 1
"""What every random generator in use takes, also after seeds are derived from it."""

_TOKEN_S, _LEAST_REQUEST_S = 0.2, 600.0
_START_S, _GPU_START_S = 300.0, 1200.0


class ModelConfig(Section):
    """The policy's starting point. Every dimension is read from the checkpoint's own ``config.json``."""

    path: Path = Field(description="Hugging Face checkpoint directory of the initial policy.")
    weights: Path | None = None
    """Checkpoint with the policy's weights, from `slime-like convert to-megatron` or a run's checkpoints/step-N."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision in trainer and engine."""
    trust_remote_code: bool = Field(False, description="Run Python code from the checkpoint.")


class ReferenceConfig(Section):
    """The reference policy of the KL term. Used only when a KL coefficient is above 0."""

    path: Path | None = Field(None, description="Hugging Face checkpoint; none: the initial policy.")
    placement: Literal["trainer", "workers"] = "trainer"
    """trainer: the trainer ranks swap in the reference. workers: separate devices score groups during sampling."""
    update_interval: int = Field(0, ge=0)
    """Steps after which the policy becomes the reference; 0: never."""
    workers: int = Field(1, ge=1, description="Number of reference workers.")
    parallel: ParallelConfig = Field(ParallelConfig(), description="Layout of each reference worker.")
    max_worker_restarts: int = Field(2, ge=0)
    """Restarts of failed workers in a run."""


DataFormat = Literal["keys", "gsm8k", "math", "dapo", "openr1"]


class DataSource(Section):
    """One source of a mixture."""

    name: str = Field(pattern=r"^[\w.-]+$", description="In metrics.")
    files: tuple[Path, ...] = Field(min_length=1, description="As `data.train`.")
    weight: float = Field(1.0, gt=0, description="Share of the prompts, relative to the other sources.")
    format: DataFormat | None = Field(None, description="As `data.format`, which is the default.")


class DataConfig(Section):
    """Prompt files (JSONL or Parquet) and the keys inside their rows; a dotted key leads into nested objects."""

    train: tuple[Path, ...] = ()
    """Training data: .jsonl, .parquet or .arrow files, patterns, or directories that Hugging Face's `datasets`
    saved."""
    mixture: tuple[DataSource, ...] = ()
    """Several sources instead of `train`, each with a relative share of the prompts."""
    format: DataFormat = "keys"
    """Form of the rows: the keys below, or a data set's published form."""
    system_prompt: str | None = Field(None, description="A system message before every prompt.")
    prompt_key: str = Field("prompt", description="Row key of the prompt, text or chat messages.")
    answer_key: str = Field("answer", description="Row key of the ground-truth answer.")
    response_key: str = Field("response", description="Row key of the demonstration (supervised only).")
    messages_key: str | None = None
    """Row key of a conversation whose assistant turns carry loss (supervised only)."""
    token_ids_key: str = "input_token_ids"
    """Row key of a tokenized prompt, which replaces the text."""
    environment_key: str | None = None
    """Row key of a mapping for the environment or agent."""
    apply_chat_template: bool = Field(True, description="Apply the tokenizer's chat template to prompts.")
    allow_special_tokens: bool = False
    """Accept text that spells special tokens."""
    max_prompt_tokens: int = Field(1024, ge=1, description="Longer prompts are dropped and counted, never truncated.")
    shuffle: bool = Field(True, description="Shuffle every epoch.")

    @property
    def parts(self) -> tuple["DataConfig", ...]:
        """The settings of each source of the mixture, its files as ``train``; without a mixture these alone."""
        return tuple(
            self.model_copy(update={"train": one.files, "mixture": (), "format": one.format or self.format})
            for one in self.mixture
        ) or (self,)

    @property
    def training_files(self) -> tuple[Path, ...]:
        """Of all sources."""
        return tuple(file for part in self.parts for file in part.train)


class EvaluationConfig(Section):
    """Held-out evaluation during training."""

    files: tuple[Path, ...] = Field((), description="Held-out files.")
    every: int = Field(0, ge=0, description="Interval in steps; 0: before and after training only.")
    max_prompts: int | None = Field(None, ge=1, description="Prompts used per file; none: all.")
    temperature: float = Field(0.0, ge=0.0, description="0 is greedy.")
    samples_per_prompt: int = Field(1, ge=1, description="Responses per prompt; above 1 also gives pass@k.")
    max_new_tokens: int | None = Field(None, ge=1, description="Length limit; none: `rollout.max_new_tokens`.")


class CheckpointConfig(Section):
    """Checkpoints and the exported model."""

    every: int = Field(0, ge=0, description="Checkpoint interval in steps; 0: at the end only.")
    keep: int = Field(2, ge=1, description="Checkpoints kept; older ones are removed after a save.")
    async_save: bool = False
    """Write checkpoints during training."""
    export_hf: bool = Field(True, description="Write a Hugging Face model at the end.")


class LoggingConfig(Section):
    """Destinations of metrics; `metrics.jsonl` is always written."""

    tensorboard: bool = Field(True, description="Write a TensorBoard log.")
    wandb: bool = Field(False, description="Log to Weights & Biases (needs the package).")
    wandb_project: str = Field("slime-like", description="Weights & Biases project.")
    progress: Literal["auto", "live", "plain", "off"] = "auto"
    """Progress display; auto: live on a terminal, else plain lines."""


class DebugConfig(Section):
    """Switches for experiments on the method, and what is kept to inspect a run."""

    shuffle_advantages: bool = False
    """Permute advantages: a control run, which must not learn."""
    samples_per_step: int = Field(4, ge=0, description="Samples per logged step in the debug tables; 0: none.")
    tables_every: int = Field(10, ge=1, description="Interval of debug tables in steps.")
    save_rollouts: Path | None = Field(None, description="Directory for every step's scored rollouts.")
    load_rollouts: Path | None = None
    """Directory of saved rollouts to train on, without engines."""


class ClusterConfig(Section):
    """The Ray cluster."""

    address: str | None = Field(None, description="Address of a running Ray cluster.")
    object_store_mb: int = Field(512, ge=80)
    """Ray's object store, in MiB per node."""
    placement: Literal["separate", "colocated"] = "separate"
    """colocated: engines and trainer ranks take turns on the same devices."""
    nodes: int | None = Field(None, ge=1, description="Nodes; `slime-like launch` sets it. none: as many as needed.")
    gpus_per_node: int = Field(8, ge=1, description="GPUs per node; `slime-like launch` counts them.")
    allow_idle_gpus: bool = Field(False, description="Accept GPUs of `nodes` that nothing uses.")
    gpu: GpuName = Field("h100-80gb", description="GPU assumed by `slime-like plan`.")
    gpu_memory_gib: float | None = Field(None, gt=0, description="GPU memory in GiB, for the plan.")
    host_memory_gib: float | None = Field(None, gt=0, description="Node memory in GiB, for the plan.")
    nvlink_gb_per_s: float | None = Field(None, gt=0)
    """GB/s between GPUs of a node, for the plan."""
    network_gb_per_s: float = Field(50.0, gt=0)
    """GB/s between nodes per GPU, for the plan."""

    @field_validator("address")
    @classmethod
    def _of_a_cluster(cls, address: str | None) -> str | None:
        """A Ray client is no node: it has no session directory, and the run's process needs the one of its node."""
        if address is not None and address.startswith("ray://"):
            raise ValueError(
                "is a Ray client's address, which is not supported; start the run on a node of the cluster, and give "
                "auto or the HOST:PORT that `ray start --head` printed"
            )
        return address


class RunConfig(Section):
    """Root of the configuration; YAML keys and command-line flags mirror these names."""

    run_dir: Path
    """Directory that the run writes."""
    steps: int = Field(100, ge=1, le=MAX_STEPS, description="Training steps.")
    seed: int = Field(0, ge=0, le=MAX_SEED, description="Seed of data order, sampling and initialization.")
    resume: str = "auto"
    """auto: resume from the latest checkpoint, if any. never: start over and rename the earlier run. PATH: resume from
    that checkpoint."""
    model: ModelConfig = Field(description="The policy.")
    reference: ReferenceConfig = Field(ReferenceConfig(), description="The reference policy.")
    data: DataConfig = Field(DataConfig(), description="Training prompts.")
    evaluation: EvaluationConfig = Field(EvaluationConfig(), description="Held-out evaluation.")
    rollout: RolloutConfig = Field(RolloutConfig(), description="Engines and sampling.")
    reward: RewardConfig = Field(RewardConfig(), description="Rewards.")
    sync: SyncConfig = Field(SyncConfig(), description="Weight sync.")
    algorithm: AlgorithmConfig = Field(AlgorithmConfig(), description="The objective.")
    trainer: TrainerConfig = Field(TrainerConfig(), description="The trainer.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="Checkpoints.")
    logging: LoggingConfig = Field(LoggingConfig(), description="Logging.")
    debug: DebugConfig = DebugConfig()
    """Control runs, debug tables, saved rollouts."""
    cluster: ClusterConfig = Field(ClusterConfig(), description="The Ray cluster.")

    @property
    def supervised(self) -> bool:
        """True in supervised mode: demonstrations instead of rollouts, no engine, no reward."""
        return self.algorithm.loss == "sft"

    @property
    def reference_in_trainer(self) -> bool:
        """Trainer ranks hold a reference and score with it."""
        return self.algorithm.needs_reference and self.reference.placement == "trainer"

    @property
    def reference_workers(self) -> int:
        """Workers that hold a reference, where rollouts are sampled."""
        in_use = self.algorithm.needs_reference and not self.supervised and self.debug.load_rollouts is None
        return self.reference.workers if in_use and self.reference.placement == "workers" else 0

    def bucket_bytes(self, on_gpus: bool) -> int:
        """Return the largest bucket of a weight sync. GPUs that engines share have room: their KV cache is away."""
        roomy = on_gpus and self.cluster.placement == "colocated"
        return int((self.sync.bucket_mb or (1024 if roomy else 256)) * 2**20)

    @property
    def samples_after_saves(self) -> bool:
        """True if sampling follows a checkpoint, without a weight sync between them."""
        return 0 < self.checkpoint.every < self.steps

    @property
    def request_timeout_s(self) -> float:
        """Timeout of one request. A large model takes 0.05 s per token; a full engine makes requests wait."""
        longest = max(self.rollout.max_new_tokens, self.evaluation.max_new_tokens or 0)
        return self.rollout.request_timeout_s or max(_LEAST_REQUEST_S, _TOKEN_S * longest)

    @property
    def engine_start_timeout_s(self) -> float:
        """Timeout of an engine's start, of an engine on a CPU by default: see ``for_gpu_engines``."""
        return self.rollout.start_timeout_s or _START_S

    def for_gpu_engines(self) -> Self:
        """This configuration as engines on GPUs read it: they also compile, and capture graphs, when they start."""
        seconds = self.rollout.start_timeout_s or _GPU_START_S
        return self.model_copy(update={"rollout": self.rollout.model_copy(update={"start_timeout_s": seconds})})

    @property
    def silence_s(self) -> float:
        """Longest time in which engines may answer no request. With agents a request is a group of rollouts, which
        may wait for workers."""
        agent = self.rollout.agent
        if not agent.is_set:
            return self.request_timeout_s
        samples = max(self.rollout.samples_per_prompt, self.evaluation.samples_per_prompt)
        rounds = 1 + math.ceil(samples / agent.workers)
        return max(self.request_timeout_s, rounds * (agent.timeout_s + agent.start_timeout_s))

    @property
    def longest_row(self) -> int:
        """Tokens of the longest sequence that is trained on."""
        row = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        return self.max_model_len if self.rollout.agent.is_set else row

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and response together, of training and evaluation."""
        response, held_out = self.rollout.max_new_tokens, self.evaluation
        if held_out.files and not self.rollout.agent.is_set:  # an agent's rows may be as long as this
            response = max(response, held_out.max_new_tokens or 0)
        return self.rollout.max_model_len or self.data.max_prompt_tokens + response
