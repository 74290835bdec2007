"""Compare models of every kind of attention, head and state with Hugging Face eager, and show that each kind matters."""

import dataclasses
import functools

import pytest

from pipeline.train import packed_attention
from pipeline.train.logprobs import LINEAR
from tests.train import attention_models, cases, ranks
from tests.train.ranks import Layout

pytestmark = pytest.mark.usefixtures("realm")
EVERY = list(range(len(cases.LENGTHS)))
QUICK = ("gemma2", "gemma4_per_layer", "gpt_oss", "cohere2", "qwen3_5_text", "bamba")
GEMMA4 = ("gemma4_text", "gemma4_moe", "gemma4_per_layer")


def models() -> list:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in attention_models.configs()]


@pytest.mark.parametrize("name", models())
def test_a_model_equals_eager(name, tmp_path):
    attention_models.write(tmp_path, [name])
    ranks.check_against_eager(ranks.backend(cases.policy(tmp_path / name)), Layout(1, 1), tmp_path / name, 3e-6)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gpt_oss" else pytest.mark.full) for name in attention_models.configs()]
)
def test_selective_recomputation(name, tmp_path):
    """gpt-oss adds the biases of its experts to their products in place."""
    attention_models.write(tmp_path, [name])
    trained = ranks.backend(cases.policy(tmp_path / name), activation_checkpointing=True, recompute_granularity="selective")
    ranks.check_against_eager(trained, Layout(1, 1), tmp_path / name, 3e-6)


def over_ranks(names, layout: Layout, folder) -> None:
    for name in names:
        ranks.check_against_eager(ranks.backend(cases.policy(folder / name), layout), layout, folder / name, 3e-6)


@pytest.mark.full
def test_kinds_over_context_parallel_ranks(tmp_path):
    """Windows, soft caps, sinks and scaled logits."""
    names = ("gemma2", "gpt_oss", "cohere2")
    attention_models.write(tmp_path, names)
    ranks.run(functools.partial(over_ranks, names), Layout(1, 1, context=2), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("layout", [Layout(1, 2), Layout(1, 2, sequence=True)], ids=lambda layout: layout.name)
def test_joint_and_latent_projections_over_tensor_parallel_ranks(layout, tmp_path):
    names = ("glm4", "phi3", "olmo2", "glm4_moe_lite")
    attention_models.write(tmp_path, names)
    ranks.run(functools.partial(over_ranks, names), layout, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [Layout(2, 1), Layout(1, 2), Layout(1, 2, sequence=True), Layout(1, 1, context=2), Layout(2, 2)],
    ids=lambda layout: layout.name,
)
def test_layers_that_differ_over_ranks(layout, tmp_path):
    """Numbers and sizes of heads, shared keys and values, and embeddings for each layer; two ranks share the only head."""
    attention_models.write(tmp_path, (*GEMMA4, "ministral3"))
    ranks.run(functools.partial(over_ranks, (*GEMMA4, "ministral3")), layout, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [Layout(2, 1, expert=2), Layout(1, 2, expert=2, sequence=True)], ids=lambda layout: layout.name
)
def test_experts_beside_an_mlp_over_expert_parallel_ranks(layout, tmp_path):
    attention_models.write(tmp_path, ["gemma4_moe"])
    ranks.run(functools.partial(over_ranks, ["gemma4_moe"]), layout, tmp_path)


# For each kind: a model that has it, and the change of its config that removes it.
WITHOUT = {
    "window": ("mistral", {"window": None}),
    "window of some layers": ("gemma3_text", {"window": None}),
    "window, with sinks": ("gpt_oss", {"window": None}),
    "one key more": ("mistral", {"window": attention_models.WINDOW + 1}),
    "soft cap of scores": ("gemma2", {"softcap": None}),
    "scale": ("gemma2", {"scale": None}),
    "sinks": ("gpt_oss", {"sinks": None}),
    "soft cap of logits": ("gemma2", {"head": LINEAR}),
    "scale of logits": ("cohere", {"head": LINEAR}),
    "divisor of logits": ("granite", {"head": LINEAR}),
}


@pytest.mark.parametrize("what", [pytest.param(w, marks=() if w == "sinks" else pytest.mark.full) for w in WITHOUT])
def test_each_kind_matters(what, tmp_path, monkeypatch):
    """Check that log-probs without it differ by far more than the tolerance of 1e-5."""
    name, change = WITHOUT[what]
    attention_models.write(tmp_path, [name])
    trained = ranks.backend(cases.policy(tmp_path / name))
    batch = cases.pack(EVERY)
    right = trained.forward([batch])[0].logprobs
    attend, kinds = packed_attention.attend, change.keys() & {"window", "softcap", "scale"}

    def wrong(query, key, value, packing, kind, sinks=None):
        if kind.window is not None or "window" not in kinds:  # other layers stay full
            kind = dataclasses.replace(kind, **{k: change[k] for k in kinds})
        return attend(query, key, value, packing, kind, None if "sinks" in change else sinks)

    monkeypatch.setattr(packed_attention, "attend", wrong)
    if "head" in change:
        trained._model.head = dataclasses.replace(trained._model.head, function=change["head"])
    assert (trained.forward([batch])[0].logprobs - right).abs().max() > 1e-2
