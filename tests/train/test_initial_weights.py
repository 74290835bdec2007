"""Read the tensors of a checkpoint's files, as both backends do, and refuse checkpoints of other models."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from launch.preflight import model_weights
from pipeline.boxes import Box, whole
from pipeline.config import PolicyConfig
from pipeline.models.weight_files import read_weight_files
from pipeline.train.initial_weights import ReadBox, initial_weights
from tests.models.cases import FAMILIES, write_models
from tests.problems import named, refused


@pytest.fixture(scope="module")
def families_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    write_models(folder)
    return folder


@pytest.fixture
def checkpoint(families_folder, tmp_path) -> Path:
    """Return a copy of a checkpoint, to damage."""
    return Path(shutil.copytree(families_folder / "llama", tmp_path / "copy"))


def reader(checkpoint: Path) -> ReadBox:
    return initial_weights(PolicyConfig(model_name=str(checkpoint)), AutoConfig.from_pretrained(checkpoint), seed=0)


def write_stale_copies(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Divide a checkpoint in two files that both hold every tensor; only one copy of each is right. Return the files."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{1 + i % 2:05d}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    files = {
        file: {name: tensor if weight_map[name] == file else tensor + 1 for name, tensor in tensors.items()}
        for file in set(weight_map.values())
    }
    for file, held in files.items():
        save_file(held, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return files


def test_the_index_chooses_among_copies(checkpoint, families_folder):
    """The first file's copies are stale for one half of the tensors, the last file's for the other half."""
    files = write_stale_copies(checkpoint)
    right, read = load_file(families_folder / "llama/model.safetensors"), reader(checkpoint)
    assert len(right) > 10
    assert all(torch.equal(read(name, whole(tensor.shape)), tensor) for name, tensor in right.items())
    other = min(files)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(right, other)}))
    read = reader(checkpoint)
    assert all(torch.equal(read(name, whole(tensor.shape)), tensor) for name, tensor in files[other].items())


def test_tensors_keep_their_own_precision(checkpoint):
    file = checkpoint / "model.safetensors"
    tensors = {n: t.bfloat16() if "proj" in n else t.half() if n == "lm_head.weight" else t for n, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    read = reader(checkpoint)
    for name, tensor in tensors.items():
        back = read(name, whole(tensor.shape))
        assert back.dtype == tensor.dtype and torch.equal(back, tensor)
    assert torch.equal(read("lm_head.weight", Box((3, 5), (7, 2))), tensors["lm_head.weight"][3:10, 5:7])


@pytest.mark.parametrize(
    "family, change, message",
    [
        ("llama", lambda tensors: tensors.pop("model.norm.weight"), r"missing \['model.norm.weight'\]"),
        ("llama", lambda tensors: tensors.update(extra=torch.zeros(2)), r"unknown \['extra'\]"),
        ("llama", lambda tensors: tensors.update({"model.norm.weight": torch.zeros(31)}), r"norm.weight \(31,\) for \(32,\)"),
        ("llama", lambda tensors: tensors.update({"model.norm.weight": torch.zeros(32).char()}), "I8; .* quantized"),
        (
            "qwen3_tied",
            lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}),
            "lm_head.weight and model.embed_tokens.weight differ .*tie_word_embeddings=false",
        ),
    ],
    ids=["missing", "unknown", "shape", "quantized", "tied"],
)
def test_a_checkpoint_of_another_model_is_refused(family, change, message, families_folder, tmp_path):
    checkpoint = Path(shutil.copytree(families_folder / family, tmp_path / "copy"))
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"policy.model_name.*{message}"):
        reader(checkpoint)


def test_a_folder_without_weights_is_refused(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    with refused(("policy.model_name", "unavailable-model")):
        reader(checkpoint)


def test_tied_copies_are_accepted(families_folder, tmp_path):
    checkpoint = Path(shutil.copytree(families_folder / "qwen3_tied", tmp_path / "tied"))
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    reader(checkpoint)


@pytest.mark.parametrize("name", FAMILIES)
def test_submission_accepts_the_tensors_of_every_family(name, families_folder):
    """transformers wrote them. A checkpoint without one, with another shape or with one too many is refused."""
    folder = families_folder / name
    config, stored = json.loads((folder / "config.json").read_text()), read_weight_files(folder).tensors
    assert list(model_weights.tensor_problems("k", folder, config, stored, "logprobs")) == []
    first, *rest = stored
    for wrong in (
        {n: stored[n] for n in rest},
        {**stored, "model.layers.0.other": stored[first]},
        {**stored, first: replace(stored[first], shape=(1, 2, 3))},
    ):
        assert named(model_weights.tensor_problems("k", folder, config, wrong, "logprobs")) == {("k", "unavailable-model")}
