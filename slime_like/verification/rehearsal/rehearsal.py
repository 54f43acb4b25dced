"""A recipe run small on this machine: what only rows, templates, rewards and restarts show, and no plan.

A small random model like the real one trains a few steps under the recipe; the run is killed, resumed and exported.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from slime_like.checks.check import check_machine, check_settings
from slime_like.checks.definition import training_needs
from slime_like.config import RunConfig
from slime_like.config.reading.load import save_config
from slime_like.data.prompts import PromptSource
from slime_like.data.token_budget import TokenBudget
from slime_like.data.tokenizer import load_tokenizer, token_names
from slime_like.errors import ConfigError, SlimeLikeError
from slime_like.examples.look_alike import make_look_alike
from slime_like.models.dimensions import ModelDimensions
from slime_like.orchestration.rollout.evaluation import held_out
from slime_like.orchestration.rollout.requests import stop_tokens
from slime_like.orchestration.run.start_notes import (
    algorithm_notes,
    checkpoint_notes,
    held_out_notes,
    support_notes,
)
from slime_like.system.words import counted
from slime_like.verification.rehearsal.answers import answer_findings
from slime_like.verification.rehearsal.finding import Finding, listed
from slime_like.verification.rehearsal.rows import row_findings
from slime_like.verification.rehearsal.small_recipe import changes, layers_of, small_recipe
from slime_like.verification.rehearsal.small_run import SmallRun

STEPS = 3
_DROPPED = 0.05
"""Share of prompts over the limit above which the limit, or the data, is taken for a mistake."""
_LEAST_KNOWN = 0.5
"""Share of a model's vocabulary that its tokenizer has at least."""
_CODE = re.compile(r"\[([a-z][a-z.-]+)\]")
_WEIGHTS_AND_ROWS = {
    "model.weight-files",
    "reference.weight-files",
    "data.train",
    "data.mixture-files",
    "evaluation.files",
}
"""What a machine may lack: the weights are not needed, and rows are a stage of their own."""
_CORRECT = "correct chat_template among the tokenizer's files (tokenizer_config.json, or chat_template.jinja)"
_USER, _ASSISTANT = "What is asked.", "What is answered."


def rehearse(config: RunConfig, directory: Path, steps: int = STEPS) -> Iterator[Finding]:
    """Try the recipe, what costs least first. Without usable rows there is no small run.

    What is found a second time, as a later stage meets it, is a note.

    Args:
        directory: the small model, the small recipe and its run go there; it exists and is empty.
        steps: training steps of the small run, at least 2.

    Raises:
        ConfigError: the model's configuration cannot be read or is of no known family, or the recipe cannot be made
            small.
    """
    seen = set[str]()
    for finding in _stages(config, directory, steps):
        codes = set(_CODE.findall(finding.text)) if finding.kind == "FOUND" else set[str]()
        is_known = bool(codes) and codes <= seen
        seen |= codes
        yield replace(finding, kind="note", text=f"again: {finding.text}") if is_known else finding


def _stages(config: RunConfig, directory: Path, steps: int) -> Iterator[Finding]:
    dimensions = ModelDimensions.from_checkpoint(config.model.path)
    settings = list(_settings(config, dimensions))
    yield from settings
    try:
        tokenizer = load_tokenizer(config.model.path)
        yield from _vocabulary(config, tokenizer, dimensions)
        yield from _rows(config, tokenizer)
    except SlimeLikeError as error:
        yield Finding("FOUND", "rows", listed(error))
        yield Finding("note", "not tried", "template, rewards and the small run, which need rows")
        return
    yield from _template(config, tokenizer)
    can_score = not any("[reward." in finding.text for finding in settings)
    if not config.supervised:
        yield from row_findings(config, tokenizer)
    if not config.supervised and can_score:
        yield from answer_findings(config)
    model = directory / "model"
    ends = [token for token in stop_tokens(config) if 0 <= token < dimensions.vocab_size]
    make_look_alike(config.model.path, model, layers_of(config, dimensions), ends=ends)
    try:
        small = small_recipe(config, model, directory / "run", steps)
    except ValueError as error:
        raise ConfigError(f"this recipe cannot be made small ({error})", code="rehearsal-size") from error
    save_config(small, directory / "recipe.yaml")
    parameters = ModelDimensions.from_checkpoint(model).num_parameters
    shown = ", ".join(changes(config, small)) or "steps and batch alone"
    yield Finding("ok", "small recipe", f"{parameters / 1e6:.1f}M parameters; {shown}")
    for is_sound, stage, text in SmallRun(small, directory).stages():
        yield Finding("ok" if is_sound else "FOUND" if is_sound is False else "note", stage, text)


def _settings(config: RunConfig, dimensions: ModelDimensions) -> Iterator[Finding]:
    """Of the real recipe at its size, whatever machine it is for."""
    problems = check_settings(config, dimensions, training_needs(config))
    for problem in problems:
        yield Finding("FOUND", "settings", f"{problem.text} [{problem.code}]")
    if not problems:
        ranks = config.trainer.parallel.world_size
        text = f"{counted(ranks, 'trainer rank')}; no rule is broken; slime-like plan computes whether GPUs suffice"
        yield Finding("ok", "settings", text)
    for note in (*algorithm_notes(config), *checkpoint_notes(config), *support_notes(config, dimensions)):
        yield Finding("note", "settings", note)
    for problem in check_machine(config, dimensions, training_needs(config)):
        if problem.code not in _WEIGHTS_AND_ROWS:
            yield Finding("note", "this machine", f"{problem.text} [{problem.code}]")


def _vocabulary(config: RunConfig, tokenizer: Any, dimensions: ModelDimensions) -> Iterator[Finding]:
    """A checkpoint's vocabulary is padded; one that is far larger, or smaller, is of another tokenizer."""
    known, size = len(tokenizer), dimensions.vocab_size
    if known > size or known < _LEAST_KNOWN * size:
        text = f"the tokenizer in {config.model.path} has {known} tokens, and config.json a vocabulary of {size}"
        yield Finding("note", "tokenizer", f"{text}: is it the model's?")


def _rows(config: RunConfig, tokenizer: Any) -> Iterator[Finding]:
    """Every row, read and encoded as the run does it.

    Raises:
        SlimeLikeError: a file or row that the run would reject.
    """
    stops = stop_tokens(config) if config.data.messages_key is not None else ()
    excess = TokenBudget(config.trainer).excess
    source = PromptSource((), tokenizer, config.data, config.seed, config.supervised, stops, excess)
    rows, dropped = source.num_rows, source.dropped_prompts
    share = dropped / (rows + dropped)
    text = f"{counted(rows, 'row')} in use, {dropped} ({share:.1%}) over data.max_prompt_tokens"
    raise_it = f"={config.data.max_prompt_tokens}; raise it, or look at the longest rows" if share > _DROPPED else ""
    yield Finding("FOUND" if share > _DROPPED else "ok", "rows", text + raise_it)
    if config.evaluation.files:
        datasets = held_out(config, tokenizer)
        yield Finding("ok", "held-out rows", counted(sum(map(len, datasets.values())), "prompt"))
        yield from (Finding("note", "held-out rows", note) for note in held_out_notes(source, datasets))
    else:
        yield Finding("note", "held-out rows", "none: nothing will say whether unseen prompts are solved")


def _template(config: RunConfig, tokenizer: Any) -> Iterator[Finding]:
    """Does a prompt hold what it is made of, and does what ends an answer stop the engines?"""
    data = config.data
    if not data.apply_chat_template:
        yield Finding("note", "chat template", "not applied; what ends an answer is not looked for")
        return
    messages = [{"role": "user", "content": _USER}]
    if data.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    answered = [*messages, {"role": "assistant", "content": _ASSISTANT}]
    try:
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        plain, whole = (tokenizer.apply_chat_template(each, tokenize=False) for each in (messages, answered))
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        yield Finding(
            "FOUND", "chat template", f"fails on a plain conversation ({type(error).__name__}: {error}); {_CORRECT}"
        )
        return
    for message in messages:
        if message["content"].strip() not in prompt:
            yield Finding("FOUND", "chat template", f"a prompt does not hold the {message['role']} message; {_CORRECT}")
    if prompt == plain and whole.startswith(prompt) and not whole[len(prompt) :].lstrip().startswith(_ASSISTANT):
        header = whole[len(prompt) :].partition(_ASSISTANT)[0]
        text = f"no generation prompt: the model itself would have to begin an answer with {header!r:.60}; {_CORRECT}"
        yield Finding("FOUND", "chat template", text)
    begin = tokenizer.encode(prompt, add_special_tokens=False)[:2]
    if len(begin) > 1 and begin[0] == begin[1] == tokenizer.bos_token_id:
        yield Finding("FOUND", "chat template", f"{tokenizer.bos_token!r} stands twice at the beginning; {_CORRECT}")
    _, said, end = whole.rpartition(_ASSISTANT)
    stops = set(stop_tokens(config))
    closing = tokenizer.encode(end, add_special_tokens=False) if said else []
    if not said:
        yield Finding("note", "chat template", "renders no assistant message; what ends an answer is unknown")
    elif not stops & set(closing):
        names = token_names(tokenizer, stops)
        text = f"an answer ends with {end!r}, which holds no stop token ({names}): responses would run to their limit; "
        one = tokenizer.encode(end.strip(), add_special_tokens=False)
        remedy = (
            f"set rollout.stop_token_ids to [{one[0]}]" if len(one) == 1 else "correct the template: that is no token"
        )
        yield Finding("FOUND", "chat template", text + remedy)
    else:
        yield Finding("ok", "chat template", f"an answer ends with {end.strip()!r}, a stop token")
