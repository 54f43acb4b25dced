"""Checks of the model directories that a configuration names."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from slime_like.checks.layout import layout_problems
from slime_like.config.lora import ADAPTER_CONFIG, ALL_LINEAR, LoraConfig, read_adapter
from slime_like.config.roles import CRITIC, POLICY, REFERENCE
from slime_like.config.run import RunConfig
from slime_like.errors import ConfigError, field_of
from slime_like.models import weight_files
from slime_like.models.dimensions import ModelDimensions
from slime_like.system.words import from_here
from slime_like.weights.adapter import factor_shapes, is_target, module_of, stored_factors, without_tower

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def find_dimensions(path: Path, field: str, values: bool = False) -> tuple[ModelDimensions | None, list[str]]:
    """Return the dimensions of the checkpoint at ``path``, perhaps as a value model, or ``None`` and its problems.
    ``field`` is the setting."""
    if absent := _missing(path, field):
        return None, absent
    try:
        return ModelDimensions.from_checkpoint(path, values), []
    except ConfigError as error:
        return None, [problem.text.replace("model.path=", f"{field}=", 1) for problem in error.problems]


def _missing(path: Path, field: str) -> list[str]:
    if path.is_dir():
        is_adapter = (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()
        problem = "is a PEFT adapter; set model.lora.path to it, and give the base here"
        return [f"{field}={path} {problem}"] if is_adapter else []
    name = str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else ""
    download = f": `hf download {name} --local-dir {path.name}` writes one" if _HUB_NAME.fullmatch(name) else ""
    problem = "is a file" if path.is_file() else f"does not exist{from_here(path)}"
    return [f"{field}={path} {problem}; give a Hugging Face checkpoint directory{download}"]


def weight_problems(config: RunConfig, dimensions: ModelDimensions) -> list[str]:
    return [f"model.path: {problem}" for problem in weight_files.weight_file_problems(config.model.path, dimensions)]


def lora_problems(config: RunConfig) -> Iterator[str]:
    """Check the adapter to continue from, and that every target is a matrix of the model."""
    lora = config.model.lora
    if lora.path is not None:
        found, problems = read_adapter(lora.path)
        yield from (f"model.lora.{problem}" for problem in problems)
        for name, value in found.items():
            if (ours := sorted(lora.targets) if isinstance(value, list) else getattr(lora, name)) != value:
                yield f"model.lora.{name}={ours}: the adapter in model.lora.path has {value}; set it to that"
    with suppress(weight_files.WeightFilesError):  # another check reports it
        yield from target_problems(lora, weight_files.header_shapes(config.model.path) if lora.is_set else {})


def factor_problems(config: RunConfig, dimensions: ModelDimensions | None = None) -> Iterator[str]:
    """Check that the adapter to continue from has the factors of this model."""
    lora = config.model.lora
    if lora.path is None or not lora.is_set or any(lora_problems(config)):
        return
    with suppress(weight_files.WeightFilesError):  # another check reports it
        expected = factor_shapes(lora, weight_files.model_shapes(config.model.path))
        try:
            found = {without_tower(name): shape for name, shape in weight_files.header_shapes(lora.path).items()}
        except weight_files.WeightFilesError as error:
            yield f"model.lora.path: {error}"
            return
        expected = stored_factors(expected, found)
        if odd := sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)):
            problem = f"{len(odd)} of its tensors are not factors of model.path, first {odd[0]}"
            yield f"model.lora.path={lora.path}: {problem}; give its base as model.path, or another adapter"


def target_problems(lora: LoraConfig, tensors: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Check that every target is a matrix of a model with these Hugging Face tensors."""
    modules = {f".{module_of(name)}" for name, shape in tensors.items() if is_target(LoraConfig(rank=1), name, shape)}
    known = {module.rpartition(".")[2] for module in modules}
    for target in lora.targets if lora.is_set and tensors and ALL_LINEAR not in lora.targets else ():
        if any(module.endswith(f".{target}") for module in modules):
            continue
        near = get_close_matches(target.rpartition(".")[2], known, n=1) or sorted(known)
        yield f"model.lora.targets: no matrix of the model's layers is named {target}; use {' or '.join(near)}"
    kinds = defaultdict[str, set[str]](set)
    for name, shape in tensors.items():
        owner, _, kind = module_of(name).rpartition(".")
        if owner.endswith(".experts") and is_target(lora, name, shape):
            kinds[owner].add(kind)
    if any(found != each for found in kinds.values() for each in kinds.values()):
        yield "model.lora.targets: PEFT needs the same matrices in each layer's experts; name the same in each layer"


def frozen_problems(config: RunConfig, policy: ModelDimensions) -> Iterator[str]:
    """Check the reference, the teacher and the critic as far as their ``config.json`` show."""
    if (unused := config.reference.path) is not None and REFERENCE not in config.roles:
        yield from _missing(unused, "reference.path")  # may contain anything, but if it is missing, it is a mistake
    for role in config.roles.values():
        model: ModelDimensions | None = policy
        if role.name != POLICY and role.path is not None:
            model, problems = find_dimensions(role.path, role.setting, role.head == "value")
            yield from problems
        if model is None or role.name == POLICY:
            continue
        if model.vocab_size != policy.vocab_size:
            sizes = f"has {model.vocab_size} tokens and model.path {policy.vocab_size}"
            yield f"{role.setting}={role.path} {sizes}; use a model with the policy's tokenizer"
        elif role.path is not None:
            yield from _token_problems(role.setting, role.path, config.model.path)
        copied = role.name == REFERENCE and config.reference.update_interval > 0
        if (copied or role.placement == "trainer") and model != replace(policy, vocab_size=model.vocab_size):
            other = "reference.update_interval=0" if copied else f"{role.section}.placement=workers"
            problem = f"has other sizes or settings than model.path={config.model.path}"
            yield f"{role.setting}={role.path} {problem}; use a model with the same ones, or {other}"
        given = config.critic.parallel if role.name == CRITIC else role.parallel
        if given is None or role.placement == "trainer":
            continue
        for problem in layout_problems(role.parallel, model):
            axis, setting = field_of(problem).rpartition(".")[2], f"{role.section}.parallel"
            if role.name == CRITIC and axis not in given.model_fields_set:
                yield problem.replace("the model", "the critic") + f", or set {setting}.{axis}"
            else:
                yield problem.replace("trainer.parallel", setting)


def _token_problems(setting: str, path: Path, model: Path) -> Iterator[str]:
    """Compare the ids of tokens, if both directories have a ``tokenizer.json``."""
    from tokenizers import Tokenizer

    files = [directory / "tokenizer.json" for directory in (path, model)]
    if path == model or not all(file.is_file() for file in files):
        return
    found, own = (Tokenizer.from_file(str(file)).get_vocab() for file in files)
    if other := sorted(token for token, index in found.items() if own.get(token, index) != index):
        problem = f"{len(other)} of its tokens have other ids than in model.path={model}, e.g. {other[0]!r}"
        yield f"{setting}={path}: {problem}; use a model with the policy's tokenizer"


def frozen_weight_problems(config: RunConfig) -> Iterator[str]:
    """Check the weight files of the reference and the teacher, if they are not the policy's, and a critic's head."""
    if (critic := config.roles.get(CRITIC)) is not None and critic.path is not None:
        with suppress(weight_files.WeightFilesError):  # reading reports it
            shapes = weight_files.header_shapes(critic.path)
            if (name := weight_files.value_head_of(shapes)) is not None and shapes[name][0] != 1:
                yield f"critic.path={critic.path}: its head has {shapes[name][0]} labels; use a model with one"
    for role in config.roles.values():
        if role.path is not None and not role.trained:
            model = find_dimensions(role.path, role.setting)[0]
            found = [] if model is None else weight_files.weight_file_problems(role.path, model)
            yield from (f"{role.setting}: {problem}" for problem in found)
