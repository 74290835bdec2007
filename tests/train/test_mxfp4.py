"""A gpt-oss in MXFP4 trains, is served and is exported in bfloat16, with the weights that transformers dequantizes."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from launch.preflight import model_weights
from pipeline.boxes import Box, whole
from pipeline.config import TokenizerConfig
from pipeline.models.hugging_face import checkpoint_shapes, model_config
from pipeline.models.mxfp4 import unpacked
from pipeline.models.shape import ModelShape
from pipeline.models.weight_files import read_weight_files
from pipeline.train.hf_export import export_checkpoint
from pipeline.train.initial_weights import initial_weights
from pipeline.train.saved_weights import model_weights as weights_of
from tests.data.test_chat import CHATML
from tests.models.cases import configs
from tests.problems import named, refused
from tests.train import cases, ranks
from tests.train.megatron import layouts
from tests.train.test_export import TINY

PROJECTIONS = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """Return a checkpoint as OpenAI publishes gpt-oss: blocks and scales of experts, and bfloat16."""
    folder = tmp_path_factory.mktemp("mxfp4")
    config = configs()["gpt_oss"]
    config.hidden_size, config.intermediate_size, config.max_position_embeddings = 64, 96, 64
    config.rope_parameters |= {"beta_fast": 32.0, "beta_slow": 1.0}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for layer, projection in itertools.product(range(config.num_hidden_layers), PROJECTIONS):
        name = f"model.layers.{layer}.mlp.experts.{projection}"
        experts, inputs, outputs = tensors.pop(name).shape
        groups = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*groups, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 126, groups, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def dequantized(published) -> dict[str, torch.Tensor]:
    """Return the weights that transformers loads from the same folder."""
    options = {"quantization_config": Mxfp4Config(dequantize=True), "dtype": torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(published, **options)
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and any(name.endswith(PROJECTIONS) for name in found)
    assert not [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


def policy_of(folder: Path):
    tokens = TokenizerConfig(TINY, chat_template=CHATML)
    return cases.policy(folder, precision="bfloat16", tokenizer=tokens)


@pytest.mark.parametrize("backend", [ranks.backend, layouts.backend], ids=["fsdp", "megatron"])
def test_both_backends_train_what_transformers_dequantizes(published, dequantized, backend, realm, tmp_path):
    """Their exports are checkpoints in bfloat16, without a word of quantization."""
    trained = backend(policy_of(published))
    try:
        check(dict(ranks.weights(trained)), dequantized)
        trained.shards().write(tmp_path / "checkpoint", 0)
    finally:
        layouts.release()
    export_checkpoint(tmp_path / "checkpoint", policy_of(published), tmp_path / "hf")
    assert "quantization_config" not in json.loads((tmp_path / "hf/config.json").read_text())
    check(load_file(tmp_path / "hf/model.safetensors"), dequantized)


@pytest.mark.parametrize("box", [Box((0, 0, 0), (4, 64, 192)), Box((1, 33, 5), (2, 30, 7)), Box((3, 31, 0), (1, 2, 192))])
def test_a_rank_reads_its_box_from_the_blocks_around_it(published, dequantized, box):
    policy, name = policy_of(published), "model.layers.1.mlp.experts.gate_up_proj"
    read = initial_weights(policy, model_config(policy), seed=0)
    assert torch.equal(read(name, box), dequantized[name][box.within(whole((4, 64, 192)))])


def test_an_engine_is_built_for_the_dequantized_weights(published, dequantized):
    """vLLM's own loader takes every tensor of the model in bfloat16, and none of blocks and scales."""
    pytest.importorskip("vllm")
    from pipeline.generate.vllm_rank import record_rank

    policy = policy_of(published)
    policy.generation.vllm_cfg.max_model_len = 32
    shapes, _ = checkpoint_shapes(model_config(policy))
    units = record_rank(policy, shapes, 0, 1)
    assert {region.name for unit in units for region in unit.regions} == shapes.keys()
    check(dict(weights_of(policy, seed=0)), dequantized)  # those of an evaluation


def test_submission_reads_the_tensors_of_the_blocks(published, tmp_path):
    model, stored = json.loads((published / "config.json").read_text()), read_weight_files(published).tensors
    assert model_weights.tensor_problems("k", published, model, stored, "logprobs") == []
    assert sum(math.prod(entry.shape) for entry in unpacked(stored).values()) == ModelShape.of(model).parameters
    scales = "model.layers.0.mlp.experts.down_proj_scales"
    without = {name: entry for name, entry in stored.items() if name != scales}
    assert named(model_weights.tensor_problems("k", published, model, without, "logprobs")) == {("k", "unavailable-model")}
    tensors = load_file(published / "model.safetensors")
    del tensors[scales]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(model))
    policy = policy_of(tmp_path)
    with refused(("policy.model_name", "unavailable-model")):
        initial_weights(policy, model_config(policy), seed=0)
