"""Sections of sampling, rewards and weight sync."""

import ipaddress
from collections.abc import Iterator
from contextlib import suppress
from os.path import exists, isfile  # unlike Path's, they accept any text
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from slime_like.config.base import Section, absolute_code

LARGEST_SUPPORT = 512
"""Largest ``top_k`` in training: the number of ids per token that the trainer reads."""

MIN_TEMPERATURE = 0.01
"""Lowest temperature above 0 that engines apply exactly."""

ENGINES = ("vllm", "sglang", "transformers")
"""Engines of this distribution. ``rollout.engine_args`` may have a section for each."""

NODE = "node"
"""``rollout.agent.host`` of each node's own address in the cluster."""

ENVIRONMENT, AGENT = "environment", "agent"
"""Names of the rewards that ``rollout.environment`` and ``rollout.agent`` return during generation."""

Untrained = Literal["auxiliary", "other_models", "side_chains", "discarded"]
"""Kinds of an agent's calls that can be excluded from training."""


OnFailure = Literal["mask", "resample", "zero"]
"""What becomes of a rollout that an environment, an agent or a reward failed on."""


class EnvironmentConfig(Section):
    """Conversations with an environment, which answers the model's turns. Its observations carry no loss.

    The response is everything after the prompt. `rollout.max_new_tokens` bounds it.
    """

    name: str | None = Field(None, description="calculator or custom code; none: single-turn responses.")
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the environment.")
    max_turns: int = Field(4, ge=1, description="Turns of the model per conversation.")
    max_turn_tokens: int | None = Field(None, ge=1, description="Token limit of one turn.")
    max_observation_tokens: int = Field(256, ge=1, description="Token limit of an observation, which is cut.")
    template: str | None = None
    """Text between two turns, with {observation}; none: the template's role `tool` or `user`."""
    workers: int = Field(1, ge=1, description="Worker processes per engine.")
    start_timeout_s: float = Field(120.0, gt=0, description="Timeout of a worker's start.")
    timeout_s: float = Field(10.0, gt=0, description="Timeout of one step.")
    on_failure: OnFailure = Field("mask", description="As `reward.on_failure`, for conversations without an outcome.")
    memory_mb: int = Field(1024, ge=128, description="Memory limit of a worker.")

    _absolute = field_validator("name")(absolute_code)

    def conflicts(self) -> Iterator[str]:
        if self.name is None and (changed := self.changed):
            yield f"{changed} is set, but rollout.environment.name is none; name an environment, or remove it"


class AgentConfig(Section):
    """Agents that call the model through an endpoint with OpenAI's and Anthropic's protocols.

    `rollout.max_new_tokens` bounds one turn, and `rollout.max_model_len` its prompt and the turn together.
    """

    name: str | None = Field(None, description="Custom code, an `async def`.")
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the agent.")
    command: tuple[str, ...] = ()
    """Program with arguments such as {base_url}, {key}, {model}, {prompt}, {task_file} and {result_file}, instead of
    `name`."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that the command inherits, besides PATH, language, time zone, TERM, TMPDIR,
    certificates and proxies."""
    host: str = Field("127.0.0.1", description="Address of the endpoint, for agents on other hosts; node: each node's.")
    max_calls: int = Field(64, ge=1, description="Calls of the model per rollout.")
    tool_parser: str = "auto"
    """Form of tool calls: a name, a JSON response template, none, or auto (the chat template's)."""
    untrained: tuple[Untrained, ...] = ("auxiliary",)
    """Calls without loss: auxiliary (other tools than the judged turn's, such as titles), side_chains (also subagents
    with the same tools), other_models (not named `policy`), discarded (repeated, then continued)."""
    answer: Literal["turn", "stdout"] = "turn"
    """What reward functions get: the judged turn, or the command's standard output. `AgentResult.answer` replaces
    both."""
    workers: int = Field(8, ge=1, description="Worker processes per engine.")
    start_timeout_s: float = Field(120.0, gt=0, description="Timeout of a worker's start.")
    timeout_s: float = Field(600.0, gt=0, description="Timeout of one rollout.")
    on_failure: OnFailure = Field("mask", description="As `reward.on_failure`, for rollouts without an outcome.")
    memory_mb: int = Field(4096, ge=128, description="Resident memory limit of a worker with its children.")

    _absolute = field_validator("name")(absolute_code)

    @field_validator("command")
    @classmethod
    def _absolute_files(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        """Make paths absolute, because a program has another working directory. PATH has a first part without "/"."""
        return tuple(
            str(Path(part).absolute()) if exists(part) and ("/" in part or (at and isfile(part))) else part  # noqa: PTH110, PTH113
            for at, part in enumerate(command)
        )

    @field_validator("host")
    @classmethod
    def _one_address(cls, host: str) -> str:
        with suppress(ValueError):
            if host == NODE or not ipaddress.ip_address(host).is_unspecified:
                return host
        raise ValueError(f"{host!r} is not the address of one host; use {NODE}, or an address such as 10.0.0.5")

    @field_validator("tool_parser")
    @classmethod
    def _absolute_file(cls, form: str) -> str:
        return str(Path(form).absolute()) if form.endswith(".json") else form

    @property
    def is_set(self) -> bool:
        return self.name is not None or bool(self.command)

    def conflicts(self) -> Iterator[str]:
        if not self.is_set and (changed := self.changed):
            yield f"{changed} is set, but rollout.agent.name and command are not; set one of them, or remove it"
        if self.name is not None and self.command:
            yield f"name={self.name} and rollout.agent.command are both set; remove one"
        elif self.command and self.options:
            yield f"options={dict(self.options)} are not for commands; give the command arguments"
        if self.name is not None and self.answer == "stdout":
            yield "answer=stdout is for commands; return AgentResult(answer=...) from the function, or remove it"
        if self.name is not None and self.environment:
            yield f"environment={list(self.environment)} is for commands; remove it, a function inherits every variable"


class RolloutConfig(Section):
    """Inference engines and sampling."""

    engine: str = Field("vllm", description="vllm, sglang, transformers or a custom engine.")
    python: Path | None = None
    """Python of the engines, with the same Ray, if their packages conflict with the trainer's."""
    num_engines: int = Field(
        1, ge=1, description="Engines. auto: fill the cluster, or the trainer's GPUs if colocated."
    )
    tensor: int = Field(1, ge=1, description="Tensor parallelism of one engine.")
    pipeline: int = Field(1, ge=1, description="Pipeline parallelism of one engine.")
    prompts_per_step: int = Field(64, ge=1, description="Prompt groups per training step.")
    samples_per_prompt: int = Field(8, ge=1, description="Responses per prompt (group size).")
    max_new_tokens: int = Field(256, ge=1, description="Token limit of a response.")
    temperature: float = Field(1.0, ge=MIN_TEMPERATURE, description="Sampling temperature in training.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Nucleus sampling.")
    top_k: int = Field(-1, ge=-1, description="Top-k sampling, at most 512; -1: off.")
    min_p: float = Field(0.0, ge=0.0, le=1.0, description="Lowest probability of a token, relative to the likeliest.")
    stop_token_ids: tuple[int, ...] = Field((), description="Token ids that end a response, besides EOS.")
    stop: tuple[str, ...] = Field((), description="Texts that end a response, and stay in it.")
    ignore_eos: bool = Field(False, description="EOS does not end a response.")
    max_model_len: int | None = Field(None, ge=2, description="Longest sequence; none: prompt and response limits.")
    max_concurrent_requests: int = Field(1024, ge=1, description="Concurrent requests per engine.")
    max_staleness: int = Field(0, ge=0)
    """Largest age, in training steps, of the weights that sample a response's first token. 0: on-policy. Above 0:
    sampling and training overlap."""
    stream: bool = Field(False, description="Train on full micro-batches while the rest of the step is generated.")
    oversample: float = Field(1.0, ge=1, description="Ratio of started to trained groups.")
    drop_zero_spread: bool = Field(False, description="Replace groups of equal rewards (DAPO's dynamic sampling).")
    max_drops_per_step: int = Field(1000, ge=1, description="Groups that a step may replace before the run fails.")
    max_engine_restarts: int = Field(2, ge=0, description="Restarts of dead engines within an hour.")
    environment: EnvironmentConfig = EnvironmentConfig()
    agent: AgentConfig = AgentConfig()
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the engine. `vllm: {max_num_seqs: 64}` is only for vllm."""
    allow_engine_args: tuple[str, ...] = Field((), description="Arguments to pass though they break a guarantee.")
    start_timeout_s: float | None = Field(None, gt=0, description="Timeout of a start; none: 1200 on GPUs, else 300.")
    request_timeout_s: float | None = Field(
        None, gt=0, description="Timeout, without weight updates; none: 0.2 per token, at least 600."
    )

    @field_validator("engine_args")
    @classmethod
    def _has_sections(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        for name in ENGINES:
            if not isinstance(arguments.get(name, {}), dict):
                raise ValueError(f"{name}={arguments[name]} must be a mapping with arguments of this engine")
        return arguments

    def conflicts(self) -> Iterator[str]:
        yield from self._truncation_conflicts()
        if "" in self.stop:
            yield "stop has an empty text, which would end every response; remove it"
        if self.ignore_eos and not self.stop_token_ids and not self.stop:
            yield "ignore_eos=true: nothing would end a response; set rollout.stop_token_ids or stop, or use false"
        turn = self.environment.max_turn_tokens
        if turn is not None and turn > self.max_new_tokens:
            yield f"environment.max_turn_tokens={turn} exceeds rollout.max_new_tokens={self.max_new_tokens}; lower it"
        if self.agent.is_set and self.environment.name is not None:
            yield "agent and rollout.environment are both set; remove one of them"
        if self.oversample > 1 and self.max_staleness > 0:
            problem = f"aborts late groups, which rollout.max_staleness={self.max_staleness} trains later"
            yield f"oversample={self.oversample:g} {problem}; use oversample: 1, or max_staleness: 0"
        if self.drop_zero_spread and self.samples_per_prompt == 1:
            yield "drop_zero_spread=true drops every group of 1; use at least 2 rollout.samples_per_prompt, or false"

    def _truncation_conflicts(self) -> Iterator[str]:
        """Yield what truncated sampling excludes. The trainer needs the tokens that each sample was drawn from."""
        if self.bounded_top_k == -1:
            return
        cut = f"top_p={self.top_p:g}, top_k={self.top_k} and min_p={self.min_p:g}"
        whole = "or use top_p: 1, top_k: -1 and min_p: 0"
        if self.top_k > LARGEST_SUPPORT:
            yield f"{cut}: training reads at most {LARGEST_SUPPORT} tokens of a distribution; lower top_k, {whole}"
        if self.top_k == 1 or self.min_p == 1:
            yield f"{cut}: every sample of a prompt is its likeliest response, without a gradient; relax it, {whole}"
        if self.engine not in ENGINES:
            names = ", ".join(ENGINES)
            yield f"{cut}: rollout.engine={self.engine} does not report the remaining tokens; use {names}, {whole}"

    @property
    def ranks(self) -> int:
        """Devices of one engine."""
        return self.tensor * self.pipeline

    @property
    def bounded_top_k(self) -> int:
        """``top_k`` in training. If only top_p or min_p truncates, it is the trainer's limit; -1: no truncation."""
        if self.top_k > 0:
            return self.top_k
        return LARGEST_SUPPORT if self.top_p < 1.0 or self.min_p > 0.0 else -1

    @property
    def own_engine_args(self) -> dict[str, Any]:
        """Arguments of the chosen engine."""
        return self.engine_args_of(self.engine)

    def engine_args_of(self, engine: str) -> dict[str, Any]:
        """Return the arguments of an engine: its section, overridden by arguments without a section."""
        shared = {name: value for name, value in self.engine_args.items() if name not in ENGINES}
        return {**self.engine_args.get(engine, {}), **shared} if engine in ENGINES else shared


class RewardFunction(Section):
    """One reward function and its weight in the sum."""

    name: str = Field(description="A name in docs/rewards.md, or custom code.")
    weight: float = Field(1.0, description="Weight in the total reward.")
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")

    _absolute = field_validator("name")(absolute_code)

    @property
    def is_given(self) -> bool:
        """Whether an environment or an agent returns the reward during generation."""
        return self.name in (ENVIRONMENT, AGENT)

    @property
    def label(self) -> str:
        """Name in metrics and tables, without a file's directory."""
        return self.name.rpartition("/")[2] if ".py:" in self.name else self.name


class RewardConfig(Section):
    """Reward functions and the processes they run in."""

    functions: tuple[RewardFunction, ...] = Field((RewardFunction(name="math_verify"),), min_length=1)
    """Reward functions, summed by weight."""
    workers: int = Field(1, ge=1, description="Worker processes.")
    start_timeout_s: float = Field(120.0, gt=0, description="Timeout of a worker's start.")
    timeout_s: float = Field(5.0, gt=0, description="Timeout of scoring one response or group.")
    memory_mb: int = Field(2048, ge=128, description="Memory limit of a worker.")
    on_failure: OnFailure = "mask"
    """A failed function's rollout. mask: not trained, and out of its group. resample: its prompt is sampled again, at
    most twice, then mask. zero: reward 0."""
    max_failed_fraction: float = Field(0.5, ge=0, le=1)
    """If a larger fraction of a step's rollouts fails, their groups are replaced, twice an hour after the first step.
    Then the run ends. 1: never."""

    def conflicts(self) -> Iterator[str]:
        names, labels = [one.name for one in self.functions], [one.label for one in self.functions]
        for index, function in enumerate(self.functions):
            field = f"functions.{index}.name={function.name}"
            if names.index(function.name) != index:
                yield f"{field} is used twice; keep one"
            elif labels.index(function.label) != index:
                yield f"{field} has the same name in metrics ({function.label}) as another function; rename one of them"
            if function.is_given and function.options:
                yield f"functions.{index}.options={dict(function.options)} are not for {function.name}; remove them"

    @property
    def computed(self) -> tuple[RewardFunction, ...]:
        """Functions that reward workers call: all but those returned during generation."""
        return tuple(function for function in self.functions if not function.is_given)


class SyncConfig(Section):
    """Weight transfer from trainer to engines."""

    transport: Literal["auto", "shared_memory", "gloo", "nccl", "colocated", "directory"] = "auto"
    """How weights are sent. auto: by device, host and placement."""
    directory: Path | None = Field(None, description="Directory of the transport `directory`.")
    bucket_mb: float | None = Field(None, gt=0)
    """Largest bucket in MiB; none: 1024 on shared GPUs, else 256."""
    delta: Literal["auto", "always", "never"] = "auto"
    """Send only changed elements, and keep copies in host memory. auto: for 16-bit models over gloo or a directory."""
    quantization: Literal["none", "fp8_blocks"] = "none"
    """fp8_blocks: send 8-bit matrices (e4m3, blocks of 128 x 128), and sample with them."""
    verify: bool = Field(True, description="Verify hashes and logprobs after every sync.")
    probe_tolerance: float | None = Field(None, gt=0, description="Logprob tolerance; none: by precision and depth.")
    timeout_s: float = Field(300.0, gt=0, description="Timeout of one sync.")

    def conflicts(self) -> Iterator[str]:
        if self.transport == "directory" and self.directory is None:
            yield "transport=directory needs sync.directory, which trainers and engines share; set it, or use auto"
        if self.transport != "directory" and self.directory is not None:
            yield f"directory={self.directory} is only for sync.transport=directory; remove it, or use that transport"
        if self.transport == "colocated" and self.delta == "always":
            yield "transport=colocated sends whole tensors, but sync.delta=always only changes; use delta: auto"
