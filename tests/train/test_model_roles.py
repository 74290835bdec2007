"""Check value models, frozen models and several at once, on one rank and on several, and their errors."""

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, CTRLConfig, GraniteConfig

from pipeline.config import TokenizerConfig
from pipeline.train.hf_export import export, export_checkpoint
from pipeline.train.train_backend import ModelRole
from pipeline.types import TopK
from tests.end_to_end.runs import ROOT
from tests.train import cases, model_roles, ranks
from tests.train.ranks import Layout

pytestmark = pytest.mark.usefixtures("realm")
ONE = Layout(1, 1)
TOKENIZER = TokenizerConfig(str(ROOT / "recipes/tiny"))
LAST = torch.tensor(cases.LENGTHS).cumsum(0) - 1


def test_one_rank(models):
    model_roles.all_roles(ONE, models)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(2, 1), marks=pytest.mark.full),
        pytest.param(Layout(1, 2), marks=pytest.mark.long),
        pytest.param(Layout(2, 2), marks=pytest.mark.long),
        pytest.param(Layout(1, 2, context=2, sequence=True), marks=pytest.mark.long),
    ],
    ids=lambda layout: layout.name,
)
def test_several_ranks(layout, models, tmp_path):
    """Their checkpoint of a value model is exported, and transformers computes their scores with it."""
    model_roles.check_random_values(ONE, models)
    ranks.run(model_roles.all_roles, layout, models)
    saved = models / "values" / layout.name
    model = models / ("qwen3_moe" if layout.tensor == 1 else "qwen3")
    export_checkpoint(saved, cases.policy(model, tokenizer=TOKENIZER), tmp_path / "hf", "values")
    check_export(tmp_path / "hf", load_file(saved / "values.safetensors")["values"])
    # It goes on as a model with values, be it a critic or a judge.
    judge = ranks.backend(cases.policy(tmp_path / "hf"), role=ModelRole("values", trained=False))
    found = judge.forward([cases.pack(list(range(len(cases.LENGTHS))))])[0].values
    assert (found - load_file(saved / "values.safetensors")["values"]).abs().max() < 1e-5


def check_export(folder, values):
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] in (["Qwen3ForSequenceClassification"], ["Qwen3MoeForSequenceClassification"])
    loaded, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert loaded.config.num_labels == 1
    assert not (folder / "generation_config.json").exists()
    assert (cases.eager_scores(folder) - values[LAST]).abs().max() < 1e-5


def test_a_running_value_model_is_exported(models, tmp_path):
    policy = cases.policy(models / "qwen3", tokenizer=TOKENIZER)
    trained = ranks.backend(policy, role=model_roles.VALUES)
    batch = cases.pack(list(range(len(cases.LENGTHS))))
    trained.step([batch], cases.value_loss)
    export(trained, policy, tmp_path / "hf", writes=True, head="values")
    check_export(tmp_path / "hf", trained.forward([batch])[0].values)


def test_a_frozen_model_cannot_step_nor_be_saved(models, tmp_path):
    frozen = ranks.backend(cases.policy(models / "qwen3"), role=ModelRole(trained=False))
    for act in (
        lambda: frozen.step([cases.pack([0])], cases.loss),
        frozen.shards,
        lambda: frozen.load(tmp_path),
    ):
        with pytest.raises(ValueError, match=r"ModelRole\(trained=False\)"):
            act()


def test_a_teacher_of_another_vocabulary_is_refused(models):
    trained = ranks.backend(cases.policy(models / "qwen3"))
    batch = cases.pack([0])
    beyond = TopK(torch.full((len(batch.tokens), 1), cases.VOCABULARY), torch.zeros(len(batch.tokens), 1))
    with pytest.raises(ValueError, match="a teacher's tokens do not fit a vocabulary of 61"):
        trained.step([dataclasses.replace(batch, teacher=beyond)], cases.loss)


def test_values_have_no_most_likely_tokens(models):
    valued = ranks.backend(cases.policy(models / "qwen3"), role=model_roles.VALUES)
    with pytest.raises(ValueError, match="does not predict tokens"):
        valued.forward([cases.pack([0])], top_k=2)


def test_a_value_model_takes_the_body_of_a_tied_language_model(models):
    ours = ranks.weights(ranks.backend(cases.policy(models / "qwen3_tied"), role=model_roles.VALUES))
    files = load_file(models / "qwen3_tied" / "model.safetensors")
    assert ours.keys() == files.keys() | {"score.weight"}
    assert torch.equal(ours["model.embed_tokens.weight"], files["model.embed_tokens.weight"])


# ---- refusals -----------------------------------------------------------------------------------------------------------


def refused(policy, match):
    with pytest.raises(ValueError, match=match):
        ranks.backend(policy, role=model_roles.VALUES)


def test_another_number_of_labels_is_refused(models, tmp_path):
    for labels in (2, 3):
        config = AutoConfig.from_pretrained(models / "qwen3_values", num_labels=labels)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / str(labels))
        refused(
            cases.policy(tmp_path / str(labels)), f"policy.model_name: .*{labels} is a sequence classifier with {labels} labels"
        )
        overridden = cases.policy(tmp_path / str(labels), hf_config_overrides={"num_labels": 1})
        refused(overridden, rf"policy.model_name: shapes .*score.weight \({labels}, 32\) for \(1, 32\)")


def test_families_without_a_score_are_refused(tmp_path):
    for config, message in [
        (GraniteConfig(**cases.SHAPE), "transformers has no sequence classifier for granite"),
        (
            CTRLConfig(vocab_size=61, n_embd=32, dff=44, n_layer=1, n_head=4),
            "policy.model_name: the value head of CTRL.*classifier.weight",
        ),
    ]:
        config.save_pretrained(tmp_path)
        refused(cases.policy(tmp_path, random_init=True), message)


def test_checkpoints_that_do_not_fit_are_refused(models, tmp_path):
    tensors = load_file(models / "qwen3_values" / "model.safetensors")
    AutoConfig.from_pretrained(models / "qwen3_values").save_pretrained(tmp_path)
    body = {name: tensor for name, tensor in tensors.items() if name != "score.weight"}
    for changed, message in [
        ({n: t for n, t in tensors.items() if n != "model.norm.weight"}, "missing.*model.norm.weight"),
        ({n: t for n, t in body.items() if n != "model.norm.weight"}, "missing.*model.norm.weight"),
        ({**tensors, "v_head.weight": torch.zeros(2)}, "unknown.*v_head.weight"),
        ({**body, "v_head.weight": torch.zeros(2)}, "unknown.*v_head.weight"),
        ({**body, "model.norm.weight": torch.zeros(3)}, "shapes.*model.norm.weight"),
    ]:
        save_file(changed, tmp_path / "model.safetensors")
        refused(cases.policy(tmp_path), message)


def test_a_value_models_checkpoint_does_not_load_into_a_policy(models, tmp_path):
    """Check the error."""
    valued = ranks.backend(cases.policy(models / "qwen3"), role=model_roles.VALUES)
    valued.shards().write(tmp_path, dist.get_rank())
    with pytest.raises(ValueError, match=r"of another model.*lm_head.*score"):
        ranks.backend(cases.policy(models / "qwen3")).load(tmp_path)
    with pytest.raises(ValueError, match=r"policy.model_name: the checkpoint .* does not fit Qwen3ForCausalLM"):
        ranks.backend(cases.policy(models / "qwen3_values"))
