"""Routes of experts, on the engines that train experts on a CPU, compared with the routers' formula in float64."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.transformers.samples import Sample
from slime_like.agents.turns import CallPrompt, Turn, _new_fields, _row
from slime_like.interfaces import Generation, PromptInput
from slime_like.orchestration.rollout.conversations import _Response
from slime_like.verification.engine.interruptions import routes, routes_amid_update
from slime_like.verification.engine.subject import ClaimFailed, ReferenceModel, Subject
from tests.engines.conftest import ENGINES
from tests.engines.harness import EngineUnderTest, run_config, started, tiny_pair

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_hidden_layers": 3},
    "deepseek_v3": {"num_hidden_layers": 3, "n_group": 4, "topk_group": 2},
}
KINDS: list[Any] = [
    pytest.param(("transformers", "qwen3_moe", {}), id="transformers"),
    pytest.param(("transformers", "deepseek_v3", {}), id="transformers-latent", marks=pytest.mark.acceptance),
    pytest.param(("sglang", "qwen3_moe", {}), id="sglang"),
    pytest.param(("sglang", "qwen3_moe", {"tensor": 2}), id="sglang-2", marks=pytest.mark.acceptance),
]
"""Engine, family and settings. SGLang retracts requests every few steps (below)."""


def chosen(reference: ReferenceModel, ids: list[int]) -> np.ndarray:
    """Return sorted experts (tokens - 1, layers with experts, choices), from the routers' inputs."""
    model: Any = reference._model
    layers = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    inputs: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0][0])) for layer in layers]
    with torch.no_grad():
        model(torch.tensor([ids[:-1]]))
    for hook in hooks:
        hook.remove()
    found = [_best(layer.gate, given, model.config) for layer, given in zip(layers, inputs, strict=True)]
    return np.sort(torch.stack(found, 1).numpy())


def _best(router: Any, states: Tensor, config: Any) -> Tensor:
    """Return the k largest logits; of sigmoid routers, scores plus bias, in groups whose two best have most."""
    logits = states.double() @ router.weight.double().T
    if config.model_type == "qwen3_moe":
        return logits.topk(config.num_experts_per_tok).indices
    scores = logits.sigmoid() + router.e_score_correction_bias.double()
    groups = scores.view(len(scores), config.n_group, -1)
    best = groups.topk(2).values.sum(-1).topk(config.topk_group).indices
    outside = torch.ones(groups.shape[:2], dtype=torch.bool).scatter(1, best, False)
    return groups.masked_fill(outside[..., None], -torch.inf).flatten(1).topk(config.num_experts_per_tok).indices


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[ReferenceModel]]:
    made = {}
    for family, sizes in SIZES.items():
        made[family] = tiny_pair(family, tmp_path_factory.mktemp(family), **sizes)
    return made


@pytest.fixture(scope="module", params=KINDS)
def engine(
    request: pytest.FixtureRequest, pairs: dict[str, list[ReferenceModel]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineUnderTest]:
    kind, family, settings = request.param
    references, run = pairs[family], tmp_path_factory.mktemp("run")
    config = run_config(references[0].directory, run, routing_replay="rollout", engine=kind, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TEST_RETRACT", "true")
        patch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "7")
        engine: Any = ENGINES[kind](config, 0)
        with started(engine, references) as under_test:
            yield under_test


@pytest.fixture
def subject(engine: EngineUnderTest, prompts: list[list[int]]) -> Iterator[Subject]:
    reference = ReferenceModel(engine.reference.directory)
    reference.use(engine.reference.weights)
    yield Subject(engine, reference, engine.references[1 - engine.current].weights, prompts[:8], routed=True)
    if engine.version:
        engine.run(engine.load(engine.current))


def test_the_reference(pairs: dict[str, list[ReferenceModel]], prompts: list[list[int]]) -> None:
    for family, (reference, other) in pairs.items():
        found = reference.routes(prompts[0], np.asarray(prompts[1]))
        assert found.shape == (len(prompts[0]) + len(prompts[1]) - 1, *((3, 2) if family == "qwen3_moe" else (2, 4)))
        np.testing.assert_array_equal(np.sort(found), chosen(reference, [*prompts[0], *prompts[1]]))
        assert (np.sort(found) != chosen(other, [*prompts[0], *prompts[1]])).mean() > 0.2


def test_claims(subject: Subject) -> None:
    assert routes(subject) == 0.0
    assert routes_amid_update(subject) == 0.0


def test_only_training_asks_for_them(engine: EngineUnderTest, prompts: list[list[int]]) -> None:
    (generation,) = engine.generate(prompts[0], max_new_tokens=3, training=False)
    assert generation.fields == {}


def test_many_requests_at_once(engine: EngineUnderTest, prompts: list[list[int]]) -> None:
    """Of many lengths, which end at different times; also the prompt's logprobs of some."""
    requests = [
        engine.request(
            prompts[i % 16], max_new_tokens=1 + 7 * i % 90, num_samples=1 + i % 3, prompt_logprobs=i % 5 == 0
        )
        for i in range(36)
    ]
    for request, generations in zip(requests, engine.generate_all(requests), strict=True):
        for generation in generations:
            ids = [*request.prompt.token_ids, *generation.token_ids.tolist()]
            np.testing.assert_array_equal(np.sort(generation.fields["routes"]), chosen(engine.reference, ids))


@pytest.mark.parametrize("engine", KINDS[:3], indirect=True)
def test_rows_of_several_turns(engine: EngineUnderTest, prompts: list[list[int]]) -> None:
    """A conversation's and an agent's row have routes of all their tokens, each as the turn chose that read it first.
    An update comes between the turns."""
    prompt, observation = prompts[3], prompts[4][:5]
    before = engine.reference
    (first,) = engine.generate(prompt, max_new_tokens=8, ignore_eos=True)
    engine.run(engine.load(1 - engine.current))
    longer = [*prompt, *first.token_ids.tolist(), *observation]
    (second,) = engine.generate(longer, max_new_tokens=8, ignore_eos=True)
    ids = [*longer, *second.token_ids.tolist()]
    read = len(prompt) + 7
    expected = np.concatenate((chosen(before, ids)[:read], chosen(engine.reference, ids)[read:]))

    response = _Response()
    response.add_turn(first)
    response.observe(observation)
    response.add_turn(second)
    assert _sorted(response.finish("stop")) == expected.tolist()

    def turn(given: list[int], generation: Generation, parent: Turn | None) -> Turn:
        asked = CallPrompt(PromptInput(given), "", (), (), "", parent)
        own = replace(generation, fields=_new_fields(generation, parent))
        return Turn(asked, own, [*given, *generation.token_ids.tolist()], "", (), ())

    row = _row(turn(longer, second, turn(prompt, first, None)), set())
    assert _sorted(row.segment) == expected.tolist()


def _sorted(row: Any) -> list[Any]:
    return list(np.sort(row.fields["routes"]).tolist())


@pytest.mark.parametrize("engine", KINDS[:1], indirect=True)
def test_faults_are_detected(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also routes that a second reading overwrites."""
    subject.prompts = subject.prompts[:2]
    monkeypatch.setattr("slime_like.verification.engine.interruptions.interrupted_requests", lambda _: [])
    usual = Sample.to_generation
    faults: list[Any] = [
        lambda routes: np.roll(routes, 1, 0),
        lambda routes: np.roll(routes, 1, 1),
        lambda routes: np.concatenate((np.full_like(routes[:3], -1), routes[3:])),
        lambda routes: routes[1:],
        lambda routes: routes.astype(np.int32),
    ]
    for fault in faults:

        def wrong(sample: Sample, fault: Any = fault) -> Generation:
            found = usual(sample)
            found.fields = {"routes": fault(found.fields["routes"])}
            return found

        with monkeypatch.context() as patch:
            patch.setattr(Sample, "to_generation", wrong)
            with pytest.raises(ClaimFailed):
                routes(subject)

    def overwrite(sample: Sample, found: np.ndarray) -> None:
        sample.routes[:] = [found]

    with monkeypatch.context() as patch:
        patch.setattr(Sample, "keep_routes", overwrite)
        assert routes(subject) == 0.0
        with pytest.raises(ClaimFailed):
            routes_amid_update(subject)
