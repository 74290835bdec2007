"""Megatron-Core trains the language model of a multimodal checkpoint; the other parts reach exports and engines unchanged."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from launch.preflight import model_weights
from launch.recipes.model_files import model_config
from pipeline.config import TokenizerConfig
from pipeline.models.frozen_names import known_groups
from pipeline.models.weight_files import read_weight_files
from pipeline.train.hf_export import export, export_checkpoint
from tests.end_to_end.runs import ROOT
from tests.train import cases, multimodal, ranks
from tests.train.megatron.layouts import ONE, PP2, TP2, TP2_SP, Layout, release
from tests.train.multimodal import in_text

FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "gemma3_text", "gemma4_text", "ministral3")
EXPORTED = "gemma3_text"
LAYOUTS = {PP2: FAMILIES, TP2_SP: ("qwen3_5_moe_text",), TP2: (EXPORTED,)}


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory) -> Path:
    """Return a folder with multimodal checkpoints, and the same as transformers saves them."""
    made = tmp_path_factory.mktemp("multimodal")
    for family in FAMILIES:
        saved = multimodal.write(models / family, made / family)
        save_file(saved, made / family / "saved.st")
        (made / family / "text").symlink_to(models / family)
        (made / family / "preprocessor_config.json").write_text(f'{{"of": "{family}"}}')
    return made


def gradients_of(layout: Layout):
    """Return a function from a backend to its gradients, under the names of a checkpoint of text alone."""
    return lambda trained: {in_text(name): gradient for name, gradient in layout.gradients(trained).items()}


def check(families: tuple[str, ...], layout: Layout, folder: Path) -> None:
    """Check a step, and what a checkpoint, an export and a refit have then."""
    for family in families:
        saved, tokenizer = load_file(folder / family / "saved.st"), TokenizerConfig(str(ROOT / "recipes/tiny"))
        policy = cases.policy(folder / family, tokenizer=tokenizer)
        trained = layout.backend(policy)
        cases.check_all_held(cases.check_layout(trained, saved))
        named = {in_text(name): name for name in saved}
        expected = layout.eager(folder / family / "text")
        found = ranks.check_step(trained, layout, expected, 3e-6, gradients=gradients_of(layout))
        assert found and len(named) == len(saved)
        if family == EXPORTED:
            trained.shards().write(folder / layout.name / "checkpoint", dist.get_rank())
            export(trained, policy, folder / layout.name / "hf", writes=dist.get_rank() == 0)
        weights = ranks.weights(trained)
        if dist.get_rank() == 0:
            same = {name for name, tensor in weights.items() if torch.equal(tensor, saved[name])}
            constants = {name for name in saved if name.endswith("layer_scalar")}
            assert same == multimodal.of_pictures(saved) | constants != set(), family
            save_file(weights, folder / family / f"{layout.name}.st")
        release()


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_trains_as_hugging_face_does(folder, realm, family):
    check((family,), ONE, folder)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_ranks_train_as_hugging_face_does(folder, layout):
    ranks.run(functools.partial(check, LAYOUTS[layout]), layout, folder)


@pytest.mark.parametrize("layout", [PP2, TP2], ids=lambda layout: layout.name)
def test_exports_are_whole_multimodal_checkpoints(folder, layout, tmp_path):
    if not (folder / layout.name).exists():
        ranks.run(functools.partial(check, (EXPORTED,)), layout, folder)
    expected = load_file(folder / EXPORTED / f"{layout.name}.st")
    tokenizer = TokenizerConfig(str(ROOT / "recipes/tiny"))
    policy = cases.policy(folder / EXPORTED, tokenizer=tokenizer)
    export_checkpoint(folder / layout.name / "checkpoint", policy, tmp_path / "hf")
    for exported in (tmp_path / "hf", folder / layout.name / "hf"):
        assert "gemma3_text" in (exported / "preprocessor_config.json").read_text()
        files = load_file(exported / "model.safetensors")
        assert files.keys() == expected.keys() and all(torch.equal(files[name], expected[name]) for name in expected)
        _, loaded = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)  # pyright: ignore
        assert not loaded["missing_keys"] and not loaded["unexpected_keys"]


@pytest.mark.parametrize("family", FAMILIES)
def test_submission_knows_the_tensors_of_the_checkpoint(folder, family):
    """It accepts its tensors, and refuses one that is missing. Both backends train and freeze tensors of the same names."""
    saved, stored = load_file(folder / family / "saved.st"), read_weight_files(folder / family).tensors
    planned = model_config(cases.policy(folder / family))
    assert model_weights.tensor_problems("k", folder / family, planned, stored, "logprobs") == []
    without = {name: entry for name, entry in stored.items() if not name.endswith("embed_tokens.weight")}
    assert (
        len(model_weights.tensor_problems("k", folder / family, planned, without, "logprobs"))
        == 1
        == len(stored) - len(without)
    )
    constants = {name for name in saved if name.endswith("layer_scalar")}
    for megatron in (True, False):
        groups = known_groups(planned, megatron, values=False)
        assert {name for names in groups.values() for name in names} == saved.keys() - multimodal.of_pictures(saved) - constants
